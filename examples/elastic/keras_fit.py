"""Handwritten digits with Keras's `fit` on ranks that come and go.

    unidist launch -np 3 --min-np 2 --max-np 4 examples/elastic/keras_fit.py

An epoch that was interrupted goes on with the samples that are left: `fit` gets them alone.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import unidist.keras as ud


class Progress(keras.callbacks.Callback):
    """Counts the batches of the epoch, before they are committed."""

    def __init__(self, state: ud.elastic.KerasState, pace: float) -> None:
        super().__init__()
        self._state = state
        self._pace = pace

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Count one."""
        self._state.batch += 1
        time.sleep(self._pace)


def main() -> None:
    """Train, and print what the ranks do."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=48, help="of all ranks together; 2, 3 and 4 divide it")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait in each step, to have time to watch")
    args = parser.parse_args()

    ud.init()
    keras.utils.set_random_seed(1)
    digits = load_digits()
    pixels, labels = (digits.data / 16.0).astype("float32"), digits.target
    steps = len(labels) // args.batch_size
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    model.compile(
        optimizer=ud.DistributedOptimizer(keras.optimizers.Adam(2e-3)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    state = ud.elastic.KerasState(model, epoch=0, batch=0)

    def rest_of_epoch() -> tf.data.Dataset:
        """Return this rank's share of the batches that are left of the present epoch."""
        order = np.random.default_rng(state.epoch).permutation(len(labels))[: steps * args.batch_size]
        mine = order.reshape(steps, args.batch_size)[state.batch :, ud.rank() :: ud.size()]
        return tf.data.Dataset.from_tensor_slices((pixels[mine], labels[mine]))

    @ud.elastic.run
    def train(state: ud.elastic.KerasState) -> None:
        print(f"rank {ud.rank()} of {ud.size()}, epoch {state.epoch}, batch {state.batch}", flush=True)
        while state.epoch < args.epochs:
            if state.batch < steps:
                callbacks = [Progress(state, args.pace), ud.elastic.CommitStateCallback(state)]
                model.fit(rest_of_epoch(), epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
            state.epoch, state.batch = state.epoch + 1, 0
            state.commit()

    train(state)
    accuracy = float((model(pixels).numpy().argmax(1) == labels).mean())
    print(f"accuracy {accuracy:.4f}, process {os.getpid()}", flush=True)


if __name__ == "__main__":
    main()
