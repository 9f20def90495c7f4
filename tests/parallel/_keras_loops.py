"""Custom loops in Keras: gradients that the script adds up itself, and layers that a rank leaves out."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import unidist.tensorflow as ud
import unidist_zero
from unidist.errors import MismatchError, UsageError
from unidist.settings.environment import set_variables

STEPS, BATCH, FEATURES = 4, 8, 5


class Stack(keras.Model):
    """Layers of equal size, of which one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(3)
        self.blocks = [
            keras.layers.Dense(FEATURES, activation="tanh", dtype="float64", name=f"block{number}")
            for number in range(4)
        ]
        self.head = keras.layers.Dense(2, dtype="float64", name="head")

    def call(self, x: Any, left_out: int = -1) -> Any:
        """Return what the others make of x."""
        for number, block in enumerate(self.blocks):
            if number != left_out:
                x = block(x)
        return self.head(x)


def make() -> tuple[Any, Any]:
    """Return the model, built, and its optimizer."""
    model = Stack()
    model(tf.zeros((1, FEATURES), tf.float64))
    return model, keras.optimizers.AdamW(0.02)


def train(model: Any, optimizer: Any, *, graph: bool, max_norm: float | None, rank: int, size: int) -> list[Any]:
    """Add up the gradients of two passes by hand, then apply them once; returns the variables."""

    def step(first: Any, second: Any) -> None:
        total: list[Any] = []
        for x in (first, second):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x) - 1.0)) / 2
            gradients = tape.gradient(loss, model.trainable_variables)
            total = [a + b for a, b in zip(total, gradients, strict=True)] if total else gradients
        if max_norm is not None:
            norm = tf.sqrt(sum(tf.reduce_sum(tf.square(each)) for each in total))
            total = [each * tf.minimum(tf.cast(1.0, each.dtype), max_norm / (norm + 1e-6)) for each in total]
        optimizer.apply_gradients(zip(total, model.trainable_variables, strict=True))

    run = tf.function(step) if graph else step
    generator = np.random.default_rng(1)
    for _ in range(STEPS):
        batches = generator.standard_normal((2, BATCH, FEATURES))
        rows = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        run(*(tf.constant(batch[rows]) for batch in batches))
    with unidist_zero.gathered(model):
        return [np.array(variable.numpy()) for variable in model.trainable_variables]


def alone(max_norm: float | None) -> list[Any]:
    """Train one process on whole batches."""
    return train(*make(), graph=False, max_norm=max_norm, rank=0, size=1)


def added_up(strategy: str) -> list[Any]:
    """Train with gradients that are added up over the ranks; returns the variables."""
    with set_variables({"UNIDIST_STRATEGY": strategy}):
        ud.init()
        try:
            model, _ = make()
            model, optimizer = ud.distribute(model, keras.optimizers.SGD(0.1 / ud.size()), op=ud.Sum)
            return train(model, optimizer, graph=False, max_norm=None, rank=ud.rank(), size=ud.size())
        finally:
            ud.shutdown()


def averaged(strategy: str) -> list[Any]:
    """Train one process with the same rule."""
    model, _ = make()
    return train(model, keras.optimizers.SGD(0.1), graph=False, max_norm=None, rank=0, size=1)


def on_rank(strategy: str, graph: bool) -> list[Any]:
    """Train on this rank's share."""
    with set_variables({"UNIDIST_STRATEGY": strategy}):
        ud.init()
        try:
            return train(*ud.distribute(*make()), graph=graph, max_norm=None, rank=ud.rank(), size=ud.size())
        finally:
            ud.shutdown()


def leaves_out() -> str:
    """Leave out another layer on each rank; returns the error."""
    with set_variables({"UNIDIST_STRATEGY": "zero=3", "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model, _ = ud.distribute(*make())
            model(tf.zeros((1, FEATURES), tf.float64))
            try:
                model(tf.zeros((1, FEATURES), tf.float64), left_out=1 + ud.rank())
            except MismatchError as exc:
                return str(exc)
            return ""
        finally:
            ud.shutdown()


class BuiltWithoutLayers(Stack):
    """Its `build` does not build its layers, as many a subclass's."""

    def build(self, input_shape: Any) -> None:
        """Build nothing."""


def without_variables() -> str:
    """Distribute a model that says it is built, and was never called; returns the error."""
    with set_variables({"UNIDIST_STRATEGY": "zero=3", "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model = BuiltWithoutLayers()
            model.build((None, FEATURES))
            assert model.built
            ud.distribute(model, keras.optimizers.AdamW(0.02))
        except UsageError as exc:
            return str(exc)
        finally:
            ud.shutdown()
        return ""
