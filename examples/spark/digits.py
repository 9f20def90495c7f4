"""Reads handwritten digits on Spark: a small model on scikit-learn's bundled images, offline.

    python examples/spark/digits.py                          # Spark on this machine
    python examples/spark/digits.py --master spark://host:7077

The one line that runs the training function on ranks is marked with (1).
"""

import argparse
import os
import sys

import torch
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import unidist.spark
import unidist.torch as ud

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
    for _ in range(epochs):
        for inputs, targets in loader:
            step(inputs, targets)
    with torch.no_grad():
        right = (model(images[:NUM_TEST]).argmax(1) == labels[:NUM_TEST]).sum()
    return right.item() / NUM_TEST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--master", default="local[2]", help="of Spark (default: local[2])")
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.master(args.master).config("spark.ui.enabled", "false").getOrCreate()

    accuracies = unidist.spark.run(train, args=[args.epochs], num_proc=args.num_proc)  # (1)
    print(f"test accuracy on {args.num_proc} ranks: {accuracies[0]:.2%}")
    spark.stop()


if __name__ == "__main__":
    main()
