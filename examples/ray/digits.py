"""Reads handwritten digits on a cluster of Ray's: a linear model on scikit-learn's bundled images, offline.

    python examples/ray/digits.py                    # starts Ray on this machine
    python examples/ray/digits.py --address auto     # on the cluster that this machine belongs to

The three lines that run the training function on ranks are marked with (1) to (3).
"""

import argparse

import ray
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import unidist.torch as ud
from unidist.ray import RayExecutor  # (1)

NUM_TEST = 360


def train(epochs: int) -> float:
    """Train on this rank and return the accuracy on the test images."""
    ud.init()
    ud.seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16  # (1797, 64)
    labels = torch.tensor(digits.target)
    data = TensorDataset(images[NUM_TEST:], labels[NUM_TEST:])
    loader = ud.shard(DataLoader(data, batch_size=32, shuffle=True))
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = ud.TrainStep(model, optimizer, torch.nn.functional.cross_entropy)
    for epoch in range(epochs):
        for inputs, targets in loader:
            loss = step(inputs, targets)
        if ud.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
    with torch.no_grad():
        right = (model(images[:NUM_TEST]).argmax(1) == labels[:NUM_TEST]).sum()
    return right.item() / NUM_TEST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--address", help="of a cluster; default: Ray is started on this machine")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    if args.address:
        ray.init(address=args.address)
    else:
        ray.init("local", num_cpus=args.num_workers, include_dashboard=False, object_store_memory=80 << 20)

    executor = RayExecutor(num_workers=args.num_workers)  # (2)
    executor.start()
    accuracies = executor.run(train, [args.epochs])  # (3)
    executor.shutdown()
    print(f"test accuracy on {args.num_workers} ranks: {accuracies[0]:.2%}")
    ray.shutdown()


if __name__ == "__main__":
    main()
