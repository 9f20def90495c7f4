"""Handwritten digits with Keras's `fit` on ranks that come and go, by a flag: the script is that of ranks that stay.

    unidist launch -np 3 --min-np 2 --max-np 4 examples/elastic/keras_flag.py

Kill a rank while it runs (`kill -9 PID`): the others go on at once, and another process takes its place. Each step
takes the same number of samples, however many ranks there are, and each sample is used once in an epoch.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import unidist.keras as ud


class Watch(keras.callbacks.Callback):
    """Tells who is there, and leaves time to watch."""

    def __init__(self, pace: float) -> None:
        super().__init__()
        self._pace = pace

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Wait."""
        time.sleep(self._pace)

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Print the loss of this rank's samples."""
        loss = (logs or {}).get("loss", 0.0)
        print(f"rank {ud.rank()} of {ud.size()}, epoch {epoch}, loss {loss:.4f}", flush=True)


def main() -> None:
    """Train, and print how well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="of one rank, at the beginning")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait in each step, to have time to watch")
    args = parser.parse_args()

    ud.init()
    keras.utils.set_random_seed(1)
    digits = load_digits()
    pixels, labels = (digits.data / 16.0).astype("float32"), digits.target

    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    model, optimizer = ud.distribute(model, keras.optimizers.Adam(2e-3))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = ud.shard(tf.data.Dataset.from_tensor_slices((pixels, labels)), batch_size=args.batch_size, seed=7)
    model.fit(data, epochs=args.epochs, verbose=0, callbacks=[Watch(args.pace)])
    accuracy = float((model(pixels).numpy().argmax(1) == labels).mean())
    print(f"accuracy {accuracy:.4f}, process {os.getpid()}", flush=True)


if __name__ == "__main__":
    main()
