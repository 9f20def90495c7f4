"""Reads handwritten digits on replicas that may be killed at any time: torchft says who trains, unidist moves the data.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    REPLICA=0 torchrun --standalone --max-restarts 9 examples/torchft/digits.py &
    REPLICA=1 torchrun --standalone --max-restarts 9 examples/torchft/digits.py

This is torchft's own example, train_ddp.py, on data that every machine has; (1) marks the line that brings unidist.
Kill a replica (`kill -9`): the others go on within a second or two, and it comes back with their weights. Gradients are
averaged in a loop, because torchft 0.2's DistributedDataParallel ends a replica in whose backward pass another is lost.
"""

import argparse
import os
from datetime import timedelta
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it
from torch.utils.data import DataLoader, TensorDataset
from torchft import DistributedSampler, Manager, Optimizer

from unidist_torch_backend.torchft import ProcessGroupUnidist

NUM_TEST = 360


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 images for training and 360 for testing; the same on every replica."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def build() -> nn.Module:
    """Return a net of 69 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=32, help="images per replica and step (default: 32)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of AdamW (default: 0.002)")
    parser.add_argument("--replicas", type=int, default=2, help="as many as are usually there (default: 2)")
    args = parser.parse_args()
    replica = int(os.environ.get("REPLICA", "0"))

    train, test = load()
    sampler = DistributedSampler(train, replica, args.replicas, group_rank=0, num_replicas=1)
    loader = DataLoader(train, args.batch_size, sampler=sampler)

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    group = ProcessGroupUnidist(timeout=timedelta(seconds=30))  # (1) instead of ProcessGroupGloo
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"digits_{replica}",
        timeout=timedelta(seconds=30),
    )
    model = build()
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=args.lr))

    while manager.current_step() < args.steps:
        for images, labels in loader:
            optimizer.zero_grad()  # finds out who trains with this replica
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            for parameter in model.parameters():
                manager.allreduce(parameter.grad).wait()  # of a lost replica it says so to the manager, and goes on
            optimizer.step()  # leaves the step out if a replica was lost in it
            step = manager.current_step()
            if step % 50 == 0:
                print(f"step {step}: loss {loss.item():.4f}, {manager.num_participants()} replica(s)", flush=True)
            if step >= args.steps:
                break
    model.eval()
    images, labels = test[:]
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).double().mean().item()
    print(f"test accuracy of replica {replica} after {manager.current_step()} steps: {accuracy:.2%}", flush=True)
    manager.shutdown(wait=False)
    group.shutdown()


if __name__ == "__main__":
    main()
