"""Reads handwritten digits: a small convolutional net on scikit-learn's bundled 8x8 images, offline.

    unidist launch -np 2 examples/torch/digits.py
    unidist launch -np 2 --strategy accumulate=2 examples/torch/digits.py
    python examples/torch/digits.py                  # the same script alone

The five lines that make it distributed are marked with (1) to (5); the rest is an ordinary training script.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

import unidist.torch as ud  # (1)

NUM_TEST = 360


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 images for training and 360 for testing; the same on every rank."""
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


def evaluate(model: nn.Module, test: TensorDataset) -> float:
    """Return the accuracy on the test images: each rank reads its share, the counts are added up."""
    model.eval()
    images, labels = test[ud.data_rank() :: ud.data_size()]
    with torch.no_grad():
        correct = (model(images).argmax(1) == labels).sum()
    return ud.allreduce(correct, op=ud.Sum, name="correct").item() / NUM_TEST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of AdamW (default: 0.002)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    ud.init()  # (2)
    ud.seed(args.seed)  # each rank its own dropout; the weights come from rank 0
    train, test = load()
    sampler = DistributedSampler(train, ud.data_size(), ud.data_rank(), seed=args.seed)  # (3) each rank its share
    loader = DataLoader(train, args.batch_size, sampler=sampler)

    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    model, optimizer = ud.distribute(model, optimizer)  # (4)

    for epoch in range(1, args.epochs + 1):
        model.train()
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        bar = tqdm(loader, f"epoch {epoch}/{args.epochs}", disable=ud.rank() != 0)
        for images, labels in bar:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        optimizer.flush()  # with --strategy accumulate=N: the last window of an epoch may be short
        mean_loss = ud.allreduce(total / len(loader), name="loss").item()  # (5) average over the ranks
        accuracy = evaluate(model, test)
        if ud.rank() == 0:
            print(f"epoch {epoch}: loss {mean_loss:.4f}, test accuracy {accuracy:.2%}", flush=True)
    if ud.rank() == 0:
        print(f"test accuracy after {args.epochs} epochs on {ud.size()} process(es): {accuracy:.2%}")
    ud.shutdown()


if __name__ == "__main__":
    main()
