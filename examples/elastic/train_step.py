"""Handwritten digits on ranks that come and go, by a flag: the loop is that of a job whose ranks stay.

    unidist launch -np 3 --min-np 2 --max-np 4 examples/elastic/train_step.py

Kill a rank while it runs (`kill -9 PID`): the others go on at once, and another process takes its place. Each step
takes the same number of samples, however many ranks there are, and each sample is used once in an epoch.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import unidist.torch as ud


def main() -> None:
    """Train, and print how well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="of one rank, at the beginning")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait in each step, to have time to watch")
    args = parser.parse_args()

    ud.init()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data / 16.0, dtype=torch.float32), torch.tensor(digits.target)

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def after_epoch(epoch: int) -> None:
        """Done once for each epoch, as a part of its last step."""
        scheduler.step()
        say(f"rank {ud.rank()} of {ud.size()}, epoch {epoch}, accuracy so far {accuracy():.4f}")

    def accuracy() -> float:
        with torch.no_grad():
            return (model(pixels).argmax(1) == labels).double().mean().item()

    policy = ud.elastic.Policy(state={"scheduler": scheduler}, after_epoch=after_epoch)
    step = ud.TrainStep(model, optimizer, torch.nn.functional.cross_entropy, elastic=policy)
    loader = ud.shard(DataLoader(TensorDataset(pixels, labels), batch_size=args.batch_size, shuffle=True), seed=7)
    for _ in range(args.epochs):
        for x, y in loader:
            step(x, y)
            time.sleep(args.pace)
    say(f"accuracy {accuracy():.4f}, process {os.getpid()}")


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
