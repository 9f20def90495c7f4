"""A loop of one's own with Accelerate, which takes the group that the script has made."""

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="unidist")
parser.add_argument("--out", required=True)
args = parser.parse_args()

dist.init_process_group(args.backend)  # before Accelerator, which knows gloo and MPI for CPUs
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

torch.manual_seed(0)
digits = load_digits()
samples = TensorDataset(torch.Tensor(digits.data) / 16, torch.tensor(digits.target))
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, 8, shuffle=True))
for _, (inputs, targets) in zip(range(12), loader, strict=False):
    with accelerator.accumulate(model):
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
assert accelerator.gather(loss.detach()[None]).numel() == 2
assert dist.get_backend(model.process_group) == args.backend
torch.save(accelerator.unwrap_model(model).state_dict(), f"{args.out}/{accelerator.process_index}.pt")
dist.destroy_process_group()
