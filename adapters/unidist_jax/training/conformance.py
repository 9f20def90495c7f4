"""The training of the conformance suites (`unidist.testing`) in JAX: one tree of parameters, trained in three ways."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from unidist.buffer import DType
from unidist.horovod_api.lifecycle import init
from unidist.testing import Quadratic, Training
from unidist_arrays.memory import NUMPY_DTYPES, Array
from unidist_jax.operations import shutdown
from unidist_jax.training.distributed_optimizer import distribute
from unidist_jax.training.train_step import TrainStep

__all__ = ["descend", "dtypes", "init", "model", "modes", "numbers", "shutdown", "tensor", "train"]

_WIDTH, _HIDDEN, _CLASSES = 6, 10, 3

modes = ("jit", "eager", "step")  # see `FrameworkTraining`
dtypes = tuple(NUMPY_DTYPES)  # see `FrameworkSamples`


def _parameters() -> dict[str, Any]:
    """Return a small network with every complication: used twice, unused, float32 and empty parameters."""
    generator = np.random.default_rng(0)

    def weight(*shape: int, dtype: Any = np.float64) -> Any:
        return jnp.asarray((0.3 * generator.standard_normal(shape)).astype(dtype))

    return {
        "inner": weight(_HIDDEN, _WIDTH),
        "unused": weight(4, 4),
        "empty": weight(0, 3),
        "head": weight(_CLASSES, _WIDTH),
        "bias": weight(_CLASSES),
        "narrow": weight(_WIDTH, dtype=np.float32),
    }


_FROZEN = 0.3 * np.random.default_rng(1).standard_normal(_HIDDEN)


def _loss(params: dict[str, Any], features_BF: Any, labels: Any, factor: float) -> Any:  # noqa: N803 - dims: batch, features
    """Return the mean loss; the float32 branch adds to it without touching the gradients of the rest."""
    hidden_BH = jnp.tanh(features_BF @ params["inner"].T + _FROZEN)  # noqa: N806
    logits = jnp.tanh(hidden_BH @ params["inner"]) @ params["head"].T + params["bias"]
    narrow = jnp.mean((features_BF.astype(jnp.float32) @ params["narrow"]) ** 2).astype(jnp.float64)
    return (jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels)) + narrow) * factor


def train(training: Training, *, distributed: bool, rank: int, size: int) -> dict[str, Array]:
    """Train on this rank's share of every batch; see `FrameworkTraining.train`."""
    with computing_in_float64():
        params: Any = _parameters()
        optimizer: Any = _optimizer(training.optimizer)
        features, labels = training.data(_WIDTH, _CLASSES)
        batches = [(features[share], labels[share]) for share in training.shares(rank, size)]
        if training.mode == "step" and distributed:
            params = _train_by_step(training, params, optimizer, batches)
        else:
            params = _train_by_loop(training, params, optimizer, batches, distributed=distributed)
        return {name: np.array(value) for name, value in {**params, "frozen": _FROZEN}.items()}


def _train_by_step(training: Training, params: Any, optimizer: Any, batches: list[tuple[Array, Array]]) -> Any:
    step = TrainStep(functools.partial(_loss, factor=training.loss_factor), params, optimizer)
    for batch in batches:
        step(*batch)
    if training.flush:
        step.flush()
    return step.params


def _train_by_loop(
    training: Training, params: Any, optimizer: Any, batches: list[tuple[Array, Array]], *, distributed: bool
) -> Any:
    if distributed:
        params, optimizer = distribute(params, optimizer)

    def update(params: Any, state: Any, features: Any, labels: Any) -> tuple[Any, Any]:
        gradients = jax.grad(_loss)(params, features, labels, training.loss_factor)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    run = update if training.mode == "eager" else jax.jit(update)
    for batch in batches:
        params, state = run(params, state, *batch)
    if distributed and training.flush:
        params, state, _ = optimizer.flush(state, params)
    return params


def descend(quadratic: Quadratic, *, rank: int) -> Array:
    """Solve a problem by gradient descent; see `FrameworkTraining.descend`."""
    target, curvature = (jnp.asarray(term) for term in quadratic.terms(rank))
    weights: Any
    weights, optimizer = distribute({"weights": jnp.zeros_like(target)}, optax.sgd(0.2))
    state = optimizer.init(weights)
    for _ in range(quadratic.steps * quadratic.passes):
        gradients = jax.grad(lambda w: jnp.sum(curvature * (w["weights"] - target) ** 2 / 2))(weights)
        updates, state = optimizer.update(gradients, state, weights)
        weights = optax.apply_updates(weights, updates)
    return np.array(weights["weights"])


def tensor(values: Array, dtype: DType) -> jax.Array:
    """Return an array with these numbers; see `FrameworkSamples.tensor`."""
    with computing_in_float64():
        return jnp.array(values.astype(NUMPY_DTYPES[dtype]))


def numbers(tensor: Any) -> Array:
    """Return what an array holds; see `FrameworkSamples.numbers`."""
    found = np.array(tensor)
    return found.astype(np.float32) if found.dtype == NUMPY_DTYPES[DType.BFLOAT16] else found


def model() -> dict[str, Any]:
    """Return a new model; see `FrameworkSamples.model`."""
    with computing_in_float64():
        return {**_parameters(), "frozen": jnp.asarray(_FROZEN)}


def _optimizer(name: str) -> optax.GradientTransformation:
    if name == "sgd":
        return optax.sgd(0.05, momentum=0.9)
    if name == "adamw":
        # An unused parameter has a gradient of zeros in JAX, so the decay must be told to leave it alone.
        return optax.adamw(0.01, weight_decay=0.1, mask=lambda params: {name: name != "unused" for name in params})
    raise ValueError(f"no optimizer {name!r} in this training; choices: sgd, adamw")


@contextmanager
def computing_in_float64() -> Iterator[None]:
    """Let JAX compute in 64 bits."""
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)
