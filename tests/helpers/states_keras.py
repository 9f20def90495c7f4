"""Trainings in Keras on TensorFlow whose parameters and state are bfloat16, beside one process without an exchange."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from precision_keras import Started

import unidist.keras as ud
import unidist_zero
from unidist.buffer import DType
from unidist.gradients.precision import Precision, Rounding
from unidist_tensorflow.optimizer.narrow_update import update_by

STEPS, BATCH, FEATURES, OUTPUTS = 6, 12, 16, 5


def network() -> Any:
    """Return a model whose sizes no number of ranks divides, with a scalar, a norm and a variable without elements."""
    keras.utils.set_random_seed(2)

    class Scaled(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
            self.nothing = self.add_weight(shape=(0,), name="nothing")

        def call(self, x: Any) -> Any:
            return x * self.scale + keras.ops.sum(self.nothing)

    layers = [keras.layers.Dense(41, activation="tanh"), Scaled(), keras.layers.Dense(OUTPUTS)]
    return keras.Sequential([keras.Input((FEATURES,)), *layers])


def optimizer(name: str, **options: Any) -> Any:
    """Return an optimizer with a schedule, which leaves biases out of weight decay."""
    rate = keras.optimizers.schedules.PolynomialDecay(0.02, 10, 0.01)
    made: Any = getattr(keras.optimizers, name)(rate, weight_decay=0.1, **options)
    made.exclude_from_weight_decay(var_names=["bias"])
    return made


def batches() -> list[tuple[Any, Any]]:
    """Return the batches of all ranks together."""
    generator = np.random.default_rng(1)
    return [
        tuple(generator.normal(size=(BATCH, n)).astype("float32") for n in (FEATURES, OUTPUTS)) for _ in range(STEPS)
    ]


def mean_loss(model: Any, x: Any, y: Any) -> Any:
    """Return the mean over samples, in float32."""
    return tf.reduce_mean(tf.reduce_sum(tf.square(tf.cast(model(x, training=True), tf.float32) - y), -1))


def of_32_bits(model: Any) -> list[Any]:
    """Return copies of all values."""
    with unidist_zero.gathered(model) if model.__dict__.get("_unidist") is not None else nullcontext():
        return [np.array(tf.cast(each.value, tf.float32)) for each in model.weights]


class Training:
    """A model and its optimizer, distributed by the strategy of the run.

    Args:
        name: of the optimizer.
        compiled: the step is a function of TensorFlow.
    """

    def __init__(self, name: str = "AdamW", *, compiled: bool = True, **options: Any) -> None:
        self.model, self.optimizer = ud.distribute(network(), optimizer(name, **options))
        self._step = tf.function(self._one) if compiled else self._one

    def _one(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = mean_loss(self.model, x, y)
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    def run(self, given: Sequence[tuple[Any, Any]]) -> list[float]:
        """Train on this rank's shares of batches; return the losses of all ranks."""
        rank, size = ud.rank(), ud.size()
        losses = [self._step(*(tf.constant(part[rank::size]) for part in batch)) for batch in given]
        return [float(ud.allreduce(loss)) for loss in losses]

    def types(self) -> set[str]:
        """Return the types of parameters and of what is kept for them."""
        kept = [each for each in self.optimizer.variables if each.dtype != "int64" and "nothing" not in each.path]
        return {each.dtype for each in [*self.model.trainable_variables, *kept] if "learning_rate" not in each.path}


def train(strategy: str, name: str = "AdamW", *, compiled: bool = True) -> tuple[list[float], list[Any], set[str]]:
    """Return losses, parameters and types."""
    with Started(strategy):
        training = Training(name, compiled=compiled)
        losses = training.run(batches())
        return losses, of_32_bits(training.model), training.types()


def alone(size: int, name: str, rounding: Rounding) -> tuple[list[float], list[Any]]:
    """Do the same in one process without an exchange: each share's gradients, added up in bfloat16."""
    kind = DType.BFLOAT16
    model, plain = network(), optimizer(name)
    for layer in model.layers:
        layer.dtype_policy = keras.DTypePolicy("bfloat16")
        for variable in layer.trainable_variables:
            value = tf.cast(variable.value, tf.bfloat16)
            variable._dtype = "bfloat16"
            variable._initialize(value)
    variables = model.trainable_variables
    plain.build(variables)
    update = update_by(plain, type(plain), Precision(kind, kind, kind, rounding=rounding))
    losses = []
    for batch in batches():
        found: list[float] = []
        sums: Any = None
        for rank in range(size):
            with tf.GradientTape() as tape:
                loss = mean_loss(model, *(tf.constant(part[rank::size]) for part in batch))
            gradients = tape.gradient(loss, variables)
            sums = gradients if sums is None else [one + other for one, other in zip(sums, gradients, strict=True)]
            found.append(float(loss))
        update([each / size for each in sums], variables, {})
        losses.append(float(np.mean(found)))
    return losses, of_32_bits(model)


def resume(saving: str, loading: str, folder: str) -> tuple[bool, set[str]]:
    """Save in the middle; return whether training goes on from there exactly, and the types there."""
    with Started(saving):
        training = Training()
        training.run(batches()[:3])
        ud.save(folder, training.model, training.optimizer)
        expected = training.run(batches()[3:])
    with Started(loading):
        training = Training()
        ud.load(folder, training.model, training.optimizer)
        return training.run(batches()[3:]) == expected, training.types()


def error_of(strategy: str, options: dict[str, Any], *, scaled: bool = False) -> str:
    """Return the error of an optimizer with these options."""
    with Started(strategy):
        made = optimizer("AdamW", **options)
        try:
            ud.distribute(network(), keras.optimizers.LossScaleOptimizer(made) if scaled else made)
        except Exception as exc:  # what is said to the script
            return f"{type(exc).__name__}: {exc}"
    return "accepted"
