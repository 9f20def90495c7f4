"""A LightningModule and Lightning's Trainer: several passes for each update, clipped."""

import argparse

import lightning
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import unidist.torch as ud

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--passes", type=int, default=2)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--out", required=True)
args = parser.parse_args()


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 32), torch.nn.GELU(), torch.nn.Linear(32, 10)
        )
        self.losses = []

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = torch.nn.functional.cross_entropy(self.net(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        self.net, optimizer = ud.distribute(self.net, optimizer)
        return optimizer

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        if gradient_clip_val:
            ud.clip_grad_norm_(optimizer, gradient_clip_val)


ud.init()
ud.seed(0)
digits = load_digits()
samples = TensorDataset(torch.Tensor(digits.data) / 16, torch.tensor(digits.target))
model = Classifier()
trainer = lightning.Trainer(
    accelerator="cpu",
    max_steps=args.steps,
    accumulate_grad_batches=args.passes,
    gradient_clip_val=0.5,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, ud.shard(DataLoader(samples, args.batch_size // args.passes)))
losses = model.losses
ud.save(args.out, model, trainer.optimizers[0])
