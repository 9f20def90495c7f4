"""The training of `_zero_memory` in Keras, in an eager loop, within which a layer can measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from _zero_memory import LAYERS, WIDTH, resident_bytes

import unidist.tensorflow as ud


class _Dense(keras.layers.Dense):
    """A dense layer that calls `measure` when it is called."""

    def __init__(self) -> None:
        super().__init__(WIDTH, use_bias=False)
        self.measure: Callable[[], None] = lambda: None

    def call(self, inputs: Any) -> Any:
        """Return what `Dense` does."""
        self.measure()
        return super().call(inputs)


def warm_up() -> None:
    """See `Backend.warm_up`."""
    model = keras.Sequential([keras.Input((8,), dtype="bfloat16"), keras.layers.Dense(8, dtype="bfloat16")])
    _step(model, keras.optimizers.AdamW(), 8)


def train(within: list[int]) -> object:
    """See `Backend.train`."""
    layers = [_Dense() for _ in range(LAYERS)]
    model: Any = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model, optimizer = ud.distribute(model, keras.optimizers.AdamW())
    for number in range(3):
        if number == 2:
            layers[LAYERS // 2].measure = lambda: within.append(resident_bytes(ud))
        _step(model, optimizer, WIDTH)
    return model, optimizer


def _step(model: Any, optimizer: Any, width: int) -> None:
    with tf.GradientTape() as tape:
        loss = keras.ops.mean(keras.ops.square(keras.ops.cast(model(keras.ops.ones((1, width))), "float32")))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
