"""Handwritten digits with PyTorch on ranks that come and go.

    unidist launch -np 3 --min-np 2 --max-np 4 examples/elastic/torch_digits.py

Kill a rank while it runs (`kill -9 PID`): the others go on at once, in their processes, from the last commit, and
another process takes its place. Every sample is used exactly once in each epoch, and the result is that of a run that
nothing happened to.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from sklearn.datasets import load_digits

import unidist.torch as ud


def main() -> None:
    """Train, and print what the ranks do."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=48, help="of all ranks together; 2, 3 and 4 divide it")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait in each step, to have time to watch")
    args = parser.parse_args()

    ud.init()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    digits = load_digits()
    count = len(digits.target) // args.batch_size * args.batch_size
    pixels = torch.tensor(digits.data[:count] / 16.0, dtype=torch.float64)
    labels = torch.tensor(digits.target[:count])
    data = torch.utils.data.TensorDataset(pixels, labels)

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    # A process that comes later is alone here, the only rank of its world, and takes all the time it needs.
    model, optimizer = ud.distribute(model, optimizer)
    sampler = ud.elastic.ElasticSampler(data, shuffle=True, seed=7)
    state = ud.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, losses=[])

    @ud.elastic.run
    def train(state: ud.elastic.TorchState) -> None:
        # Called again in every generation of the world: with another number of ranks, perhaps.
        say(f"rank {ud.rank()} of {ud.size()}, epoch {state.epoch}, {sampler.processed_num} samples done")
        per_rank = args.batch_size // ud.size()
        while state.epoch < args.epochs:
            for batch, (x, y) in enumerate(torch.utils.data.DataLoader(data, batch_size=per_rank, sampler=sampler)):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                time.sleep(args.pace)
                sampler.record_batch(batch, per_rank)
                state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    with torch.no_grad():
        accuracy = (model(pixels).argmax(1) == labels).double().mean().item()
        norm = torch.nn.utils.parameters_to_vector(model.parameters()).norm().item()
    say(f"accuracy {accuracy:.4f}, norm of the parameters {norm!r}, process {os.getpid()}")


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
