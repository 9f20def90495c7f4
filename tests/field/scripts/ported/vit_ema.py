"""A Vision Transformer of timm, its optimizer, and an average of its weights (EMA)."""

import argparse

import timm
import torch
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
from torch.utils.data import DataLoader, TensorDataset

import unidist.torch as ud

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--out", required=True)
args = parser.parse_args()

ud.init()
ud.seed(0)
digits = load_digits()
images, labels = torch.Tensor(digits.images).unsqueeze(1) / 16, torch.tensor(digits.target)
loader = ud.shard(DataLoader(TensorDataset(images, labels), args.batch_size))

size = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 2, "num_heads": 4}
model = timm.create_model("vit_tiny_patch16_224", in_chans=1, num_classes=10, **size)
optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.05)
model, optimizer = ud.distribute(model, optimizer)
average = ModelEmaV3(model, decay=0.9)
loss_fn = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

losses = []
for _, (inputs, targets) in zip(range(args.steps), loader, strict=False):
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update(model)
    losses.append(ud.allreduce(loss.detach(), name="loss").item())
ud.save(args.out, {"model": model, "average": average})
