"""Training with Keras on JAX, distributed and in one process on all samples, as the tests' ranks do it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import keras
import numpy as np

import unidist.keras as ud

FEATURES, HIDDEN, CLASSES = 6, 10, 3
STEPS, BATCH, EPOCHS = 4, 12, 2


@contextmanager
def runtime(floatx: str = "float64") -> Iterator[None]:
    """A fresh runtime around a test's work, in which Keras computes in this type."""
    before = keras.config.floatx()
    keras.config.set_floatx(floatx)
    ud.init()
    try:
        yield
    finally:
        ud.shutdown()
        keras.config.set_floatx(before)


def network(*, built: bool = True, norm: Callable[..., Any] | None = None) -> Any:
    """Return a small network with other weights on each rank, one of them constrained and one without a gradient."""
    keras.utils.set_random_seed(ud.rank() if ud.is_initialized() else 0)
    layers: list[Any] = [
        keras.layers.Dense(HIDDEN, activation="tanh", kernel_constraint=keras.constraints.MaxNorm(1.0)),
        *([norm()] if norm is not None else []),
        Unused(),
        keras.layers.Dense(CLASSES),
    ]
    return keras.Sequential([keras.Input((FEATURES,)), *layers] if built else layers)


class Unused(keras.layers.Layer):
    """Has a weight that the loss does not depend on."""

    def build(self, shape: Any) -> None:
        self.weight = self.add_weight(shape=(4, 4), initializer="ones", name="unused")

    def call(self, inputs: Any) -> Any:
        return inputs


def samples(steps: int = STEPS, batch: int = BATCH) -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(steps * batch, FEATURES)), generator.integers(CLASSES, size=steps * batch)


def share_of(arrays: tuple[Any, Any], steps: int = STEPS, batch: int = BATCH) -> tuple[Any, Any]:
    """Return this rank's samples of each batch, so that the ranks' batches together are those of one process."""
    order = np.arange(steps * batch).reshape(steps, batch)[:, ud.rank() :: ud.size()].reshape(-1)
    x, y = arrays
    return x[order], y[order]


def loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def values(model: Any) -> list[Any]:
    return [np.array(weight) for weight in model.get_weights()]


def alone(
    weights: list[Any], optimizer: Any, *, batch: int = BATCH, norm: Any = None, eagerly: bool = False
) -> list[Any]:
    """Return the weights that one process has after `fit` on all samples, without unidist."""
    model = network(norm=norm)
    model.set_weights(weights)
    model.compile(optimizer, loss(), run_eagerly=eagerly)
    model.fit(*samples(), batch_size=batch, epochs=EPOCHS, shuffle=False, verbose=0)
    return values(model)


def by_fit(model: Any, optimizer: Any, **options: Any) -> None:
    model.compile(optimizer, loss(), **options)
    x, y = share_of(samples())
    model.fit(x, y, batch_size=BATCH // ud.size(), epochs=EPOCHS, shuffle=False, verbose=0)


def _batches() -> Iterator[tuple[Any, Any]]:
    x, y = share_of(samples())
    own = BATCH // ud.size()
    for _ in range(EPOCHS):
        for start in range(0, len(x), own):
            yield x[start : start + own], y[start : start + own]


def by_batches(model: Any, optimizer: Any) -> None:
    model.compile(optimizer, loss())
    for batch in _batches():
        model.train_on_batch(*batch)


def by_loop(model: Any, optimizer: Any) -> None:
    """Train with a loop without side effects, as Keras' guide for JAX has it."""
    optimizer.build(model.trainable_variables)
    function = loss()

    def loss_of(trainable: Any, other: Any, x: Any, y: Any) -> Any:
        outputs, other = model.stateless_call(trainable, other, x, training=True)
        return function(y, outputs), other

    @jax.jit
    def step(trainable: Any, other: Any, state: Any, x: Any, y: Any) -> Any:
        gradients, other = jax.grad(loss_of, has_aux=True)(trainable, other, x, y)
        trainable, state = optimizer.stateless_apply(state, gradients, trainable)
        return trainable, other, state

    groups = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    found = [[variable.value for variable in group] for group in groups]
    for batch in _batches():
        found = step(*found, *batch)
    for group, new in zip(groups, found, strict=True):
        for variable, value in zip(group, new, strict=True):
            variable.assign(value)


def by_apply(model: Any, optimizer: Any) -> None:
    """Train with a loop that calls `apply`, at once."""
    function = loss()
    for x, y in _batches():
        trainable = [variable.value for variable in model.trainable_variables]
        other = [variable.value for variable in model.non_trainable_variables]

        def loss_of(trainable: Any, other: Any = other, x: Any = x, y: Any = y) -> Any:
            return function(y, model.stateless_call(trainable, other, x, training=True)[0])

        optimizer.apply(jax.grad(loss_of)(trainable), model.trainable_variables)


WAYS: dict[str, Callable[[Any, Any], None]] = {
    "fit": by_fit,
    "fit eagerly": lambda model, optimizer: by_fit(model, optimizer, run_eagerly=True),
    "fit, two steps at a time": lambda model, optimizer: by_fit(model, optimizer, steps_per_execution=2),
    "batches": by_batches,
    "stateless loop": by_loop,
    "apply": by_apply,
}
