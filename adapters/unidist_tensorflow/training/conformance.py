"""The training of the strategy conformance suite (`unidist.testing`) in Keras 3: one model, trained in three ways."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from unidist.buffer import DType
from unidist.horovod_api.lifecycle import init, shutdown
from unidist.testing import Quadratic, Training
from unidist_tensorflow.memory import NUMPY_DTYPES, Array
from unidist_tensorflow.training.distributed_optimizer import distribute

__all__ = [
    "computing_in_float64",
    "descend",
    "dtypes",
    "init",
    "model",
    "modes",
    "numbers",
    "shutdown",
    "tensor",
    "train",
]

_WIDTH, _HIDDEN, _CLASSES = 6, 10, 3

modes = ("eager", "function", "fit")  # see `FrameworkTraining`
dtypes = tuple(NUMPY_DTYPES)  # see `FrameworkSamples`


class Model(keras.Model):
    """A small network with every complication: used twice, frozen, unused, float32 and empty variables.

    The float32 branch adds to the loss without touching the gradients of the rest, so that those stay exact to float64.

    Args:
        loss_factor: the loss is multiplied by this.
    """

    def __init__(self, loss_factor: float) -> None:
        super().__init__()
        self._loss_factor = loss_factor
        generator = np.random.default_rng(0)

        def weight(name: str, *shape: int, dtype: str = "float64", trainable: bool = True) -> Any:
            values = 0.3 * generator.standard_normal(shape)
            return self.add_weight(
                shape,
                initializer=lambda shape, dtype: ops.cast(values, dtype),
                dtype=dtype,
                trainable=trainable,
                autocast=False,
                name=name,
            )

        self.inner = weight("inner", _HIDDEN, _WIDTH)
        self.frozen = weight("frozen", _HIDDEN, trainable=False)
        self.unused = weight("unused", 4, 4)
        self.empty = weight("empty", 0, 3)
        self.head = weight("head", _CLASSES, _WIDTH)
        self.bias = weight("bias", _CLASSES)
        self.narrow = weight("narrow", _WIDTH, dtype="float32")

    def call(self, features_BF: Any) -> Any:  # noqa: N803 - dims: batch, features
        """Return the logits, `(batch, classes)`."""
        hidden_BH = ops.tanh(features_BF @ ops.transpose(self.inner) + self.frozen)  # noqa: N806
        return ops.tanh(hidden_BH @ self.inner) @ ops.transpose(self.head) + self.bias

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        """Return the loss, with that of the float32 branch; `fit` calls it, and so do the loops here."""
        cross_entropy = ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))
        narrow = ops.mean(ops.square(ops.matmul(ops.cast(x, "float32"), ops.expand_dims(self.narrow, 1))))
        return (cross_entropy + ops.cast(narrow, "float64")) * self._loss_factor


def train(training: Training, *, distributed: bool, rank: int, size: int) -> dict[str, Array]:
    """Train on this rank's share of every batch; see `FrameworkTraining.train`."""
    with computing_in_float64():
        model: Any = Model(training.loss_factor)
        model.build((None, _WIDTH))
        optimizer: Any = _optimizer(training.optimizer)
        if distributed:
            model, optimizer = distribute(model, optimizer)
        features, labels = training.data(_WIDTH, _CLASSES)
        shares = [(features[share], labels[share]) for share in training.shares(rank, size)]
        if training.mode == "fit":
            _fit(model, optimizer, shares)
        else:
            _loop(model, optimizer, shares, in_function=training.mode == "function")
        if distributed and training.flush:
            optimizer.flush()
        return {variable.name: np.array(variable.numpy()) for variable in model.weights}


class _Weights(keras.Model):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weights_of_problem = self.add_weight(shape, initializer="zeros", name="weights")
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.weights_of_problem + 0 * inputs


def descend(quadratic: Quadratic, *, rank: int) -> Array:
    """Solve a problem by gradient descent; see `FrameworkTraining.descend`."""
    target, curvature = (tf.constant(term) for term in quadratic.terms(rank))
    model, optimizer = distribute(_Weights(target.shape), keras.optimizers.SGD(0.2))
    for _ in range(quadratic.steps * quadratic.passes):
        with tf.GradientTape() as tape:
            loss = ops.sum(curvature * (model.weights_of_problem - target) ** 2 / 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return np.array(model.weights_of_problem.numpy())


def tensor(values: Array, dtype: DType) -> tf.Tensor:
    """Return a tensor with these numbers; see `FrameworkSamples.tensor`."""
    return tf.constant(values.astype(NUMPY_DTYPES[dtype]))


def numbers(tensor: Any) -> Array:
    """Return what a tensor holds; see `FrameworkSamples.numbers`."""
    found = np.array(tensor.numpy())
    return found.astype(np.float32) if found.dtype == NUMPY_DTYPES[DType.BFLOAT16] else found


def model() -> Model:
    """Return a new model; see `FrameworkSamples.model`."""
    made = Model(1.0)
    made.build((None, _WIDTH))
    return made


def _fit(model: Any, optimizer: Any, shares: list[tuple[Array, Array]]) -> None:
    model.compile(optimizer)
    if shares:
        features, labels = (np.concatenate(parts) for parts in zip(*shares, strict=True))
        model.fit(features, labels, batch_size=len(shares[0][0]), shuffle=False, verbose=0)


def _loop(model: Any, optimizer: Any, shares: list[tuple[Array, Array]], *, in_function: bool) -> None:
    def step(features: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(features, labels, model(features, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    run = tf.function(step) if in_function else step
    for features, labels in shares:
        run(tf.constant(features), tf.constant(labels))


def _optimizer(name: str) -> Any:
    if name == "sgd":
        return keras.optimizers.SGD(0.05, momentum=0.9)
    if name == "adamw":
        return keras.optimizers.AdamW(0.01, weight_decay=0.1)
    raise ValueError(f"no optimizer {name!r} in this training; choices: sgd, adamw")


@contextmanager
def computing_in_float64() -> Iterator[None]:
    """Let Keras compute in float64 by default, and silence its warning of `unused`, which is intended."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Gradients do not exist for variables")
            yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])
