"""Fits a small model in float64, under TensorFlow's MirroredStrategy or unidist's; run by `test_strategies`."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

ROWS, BATCH, REPLICAS = 48, 16, 2


def main(by: str, output: str) -> None:
    """Fit, and save the loss and the weights."""
    keras.config.set_floatx("float64")
    generator = np.random.default_rng(5)
    x, y = generator.normal(size=(ROWS, 6)), generator.integers(3, size=ROWS)
    if by == "tensorflow":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
        mirrored = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)])
        trained, loss = _fitted(x, y, BATCH, mirrored.scope())
    else:
        import unidist.keras as ud

        ud.init()
        mine = np.arange(ROWS).reshape(-1, ud.size(), BATCH // ud.size())[:, ud.rank()].reshape(-1)
        trained, loss = _fitted(x[mine], y[mine], BATCH // ud.size(), contextlib.nullcontext(), ud)
        loss = float(ud.allreduce(tf.constant(loss), name="loss"))
        if ud.rank():
            return
    np.savez(output, loss, *trained.get_weights())


def _fitted(x: Any, y: Any, batch: int, scope: Any, ud: Any = None) -> tuple[Any, float]:
    with scope:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])
        optimizer: Any = keras.optimizers.SGD(0.1, momentum=0.9)
        if ud is not None:
            model, optimizer = ud.distribute(model, optimizer)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    history = model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
    return model, history.history["loss"][-1]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
