"""numpy's half of the conformance suites: a linear model with gradients by hand, and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from unidist.buffer import DType
from unidist.runtime import init as start
from unidist.runtime import shutdown
from unidist.testing import Quadratic, Training
from unidist_second.framework import NumpyFramework
from unidist_second.models import SGD, Model
from unidist_second.training import distribute

__all__ = ["descend", "dtypes", "init", "model", "modes", "numbers", "shutdown", "tensor", "train"]

Array = npt.NDArray[Any]

_WIDTH, _HIDDEN, _CLASSES = 6, 10, 3

modes = ("eager",)  # see `FrameworkTraining`
dtypes = tuple(dtype for dtype in DType if dtype is not DType.BFLOAT16)  # see `FrameworkSamples`


class Linear(Model):
    """x W' W H' + b against one-hot labels, by mean squares; a float32 branch; frozen, unused and empty parameters."""

    frozen = frozenset(("frozen",))

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        shapes = {"inner": (_HIDDEN, _WIDTH), "frozen": (_HIDDEN,), "unused": (4, 4), "empty": (0, 3)}
        shapes |= {"head": (_CLASSES, _WIDTH), "bias": (_CLASSES,), "narrow": (_WIDTH,)}
        self.arrays = {name: 0.3 * rng.standard_normal(shape) for name, shape in shapes.items()}
        self.arrays["narrow"] = self.arrays["narrow"].astype(np.float32)

    def gradients(self, inputs: Array, targets: Array) -> Mapping[str, Array]:
        """Return the gradients of the mean loss."""
        inner, head, narrow = (self.arrays[name] for name in ("inner", "head", "narrow"))
        hidden = inputs @ inner.T + self.arrays["frozen"]
        outer = hidden @ inner
        error = outer @ head.T + self.arrays["bias"] - np.eye(_CLASSES)[targets]
        error *= 2 / error.size
        to_outer = error @ head
        to_hidden = to_outer @ inner.T
        wide = inputs.astype(np.float32)
        return {
            "inner": hidden.T @ to_outer + to_hidden.T @ inputs,
            "head": error.T @ outer,
            "bias": error.sum(axis=0),
            "narrow": wide.T @ (wide @ narrow) * np.float32(2 / len(inputs)),
        }


def train(training: Training, *, distributed: bool, rank: int, size: int) -> dict[str, Array]:
    """Train on this rank's share of every batch; see `FrameworkTraining.train`."""
    if training.optimizer != "sgd":
        raise ValueError(f"no optimizer {training.optimizer!r} in this training; choices: sgd")
    model: Model = Linear()
    optimizer = SGD(NumpyFramework().parameters(model), lr=0.05, momentum=0.9)
    if distributed:
        model, optimizer = distribute(model, optimizer)
    features, labels = training.data(_WIDTH, _CLASSES)
    for share in training.shares(rank, size):
        gradients = model.gradients(features[share], labels[share])
        factor = training.loss_factor
        optimizer.step({name: gradient * gradient.dtype.type(factor) for name, gradient in gradients.items()})
    if training.flush:
        optimizer.flush()
    return model.arrays


class _Weights(Model):
    """One array, with the gradient of c (w - t)^2 / 2."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.arrays = {"weights": np.zeros(shape, np.float32)}

    def gradients(self, inputs: Array, targets: Array) -> Mapping[str, Array]:
        """Return the gradient; the inputs are c."""
        return {"weights": inputs * (self.arrays["weights"] - targets)}


def descend(quadratic: Quadratic, *, rank: int) -> Array:
    """Solve a problem by gradient descent; see `FrameworkTraining.descend`."""
    target, curvature = quadratic.terms(rank)
    model: Model = _Weights(target.shape)
    model, optimizer = distribute(model, SGD(model.arrays, lr=0.2))
    for _ in range(quadratic.steps * quadratic.passes):
        optimizer.step(model.gradients(curvature, target))
    return model.arrays["weights"]


def init() -> None:
    """Start unidist, as a script does."""
    start()


def tensor(values: Array, dtype: DType) -> Array:
    """Return an array with these numbers; see `FrameworkSamples.tensor`."""
    return np.array(values, dtype.value)


def numbers(tensor: Array) -> Array:
    """Return a copy; see `FrameworkSamples.numbers`."""
    return tensor.copy()


def model() -> Model:
    """Return a new model; see `FrameworkSamples.model`."""
    return Linear()
