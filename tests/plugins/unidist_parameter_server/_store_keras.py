"""Trainings in Keras that the ranks of a pool run with the strategy, and the same in plain Keras."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import unidist.tensorflow as ud
from unidist.errors import ConfigurationError, UsageError
from unidist.settings.environment import set_variables

Array = np.ndarray[Any, Any]
BATCH, WIDTH, CLASSES = 12, 6, 3


def _rate() -> Any:
    return keras.optimizers.schedules.ExponentialDecay(0.05, decay_steps=2, decay_rate=0.7)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(_rate(), momentum=0.9, nesterov=True, weight_decay=0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.05),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(_rate(), weight_decay=0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
}


@contextmanager
def unidist_with(strategy: str) -> Iterator[None]:
    """Start unidist with a strategy line."""
    with set_variables({"UNIDIST_STRATEGY": strategy}):
        ud.init()
        try:
            yield
        finally:
            ud.shutdown()


def made() -> Any:
    """Return a model of two layers in float64."""
    chance = np.random.default_rng(0)

    def values(shape: Sequence[int], dtype: Any = None) -> Any:
        return ops.cast(0.3 * chance.standard_normal(shape), "float64")

    inputs = keras.Input((WIDTH,), dtype="float64")
    hidden = keras.layers.Dense(7, "tanh", kernel_initializer=values, dtype="float64")(inputs)
    outputs = keras.layers.Dense(CLASSES, kernel_initializer=values, dtype="float64")(hidden)
    return keras.Model(inputs, outputs)


def batches(steps: int, seed: int = 1) -> list[tuple[Array, Array]]:
    """Return the batches of all ranks together."""
    chance = np.random.default_rng(seed)
    return [
        (chance.standard_normal((BATCH, WIDTH)), chance.integers(0, CLASSES, BATCH).astype("int32"))
        for _ in range(steps)
    ]


def loss_of(model: Any, inputs: Any, targets: Any) -> Any:
    """Return the mean loss."""
    return ops.mean(keras.losses.sparse_categorical_crossentropy(targets, model(inputs), from_logits=True))


def _train(model: Any, optimizer: Any, rank: int, size: int, steps: int, mode: str, seed: int = 1) -> None:
    if mode == "fit":
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64"))
        shares = [(inputs[rank::size], targets[rank::size]) for inputs, targets in batches(steps, seed)]
        inputs, targets = (np.concatenate(each) for each in zip(*shares, strict=True))
        model.fit(inputs, targets, batch_size=BATCH // size, shuffle=False, verbose=0)
        return

    def step(inputs: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(model, inputs, targets)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    run = tf.function(step) if mode == "function" else step
    for inputs, targets in batches(steps, seed):
        run(tf.constant(inputs[rank::size]), tf.constant(targets[rank::size]))


def weights(model: Any) -> list[Array]:
    """Return copies of the weights."""
    return [np.array(each) for each in model.get_weights()]


def alone(optimizer: str, steps: int, mode: str = "eager") -> list[Array]:
    """Train in plain Keras on whole batches, in a loop or by `fit`."""
    model, plain = made(), OPTIMIZERS[optimizer]()
    _train(model, plain, 0, 1, steps, mode)
    return weights(model)


def all_alone(cases: Sequence[tuple[str, str, str]], steps: int) -> list[list[Array]]:
    """Train with each optimizer, by `fit` where the case does."""
    return [alone(optimizer, steps, "fit" if mode == "fit" else "eager") for _, optimizer, mode in cases]


def trained(strategy: str, optimizer: str, steps: int, mode: str) -> list[Array]:
    """Train on this rank's samples of each batch, in a loop or by `fit`."""
    with unidist_with(strategy):
        model, bound = ud.distribute(made(), OPTIMIZERS[optimizer]())
        _train(model, bound, ud.rank(), ud.size(), steps, mode)
        return weights(model)


def all_trained(cases: Sequence[tuple[str, str, str]], steps: int) -> list[list[Array]]:
    """Train for each strategy line, optimizer and mode."""
    return [trained(strategy, optimizer, steps, mode) for strategy, optimizer, mode in cases]


def error(found: Sequence[Array], expected: Sequence[Array]) -> float:
    """Return the largest difference of a weight."""
    return max(float(np.abs(one - other).max(initial=0.0)) for one, other in zip(found, expected, strict=True))


def saved(strategy: str, optimizer: str, folder: str, steps: int) -> list[Array]:
    """Train, save, and return the weights that were saved."""
    with unidist_with(strategy):
        model, bound = ud.distribute(made(), OPTIMIZERS[optimizer]())
        _train(model, bound, ud.rank(), ud.size(), steps, "function")
        ud.save(folder, model, bound)
        return weights(model)


def continued(strategy: str, optimizer: str, folder: str, steps: int, before: int = 0) -> list[Array]:
    """Load, maybe in the middle of a training, and train on."""
    with unidist_with(strategy):
        model, bound = ud.distribute(made(), OPTIMIZERS[optimizer]())
        if before:
            _train(model, bound, ud.rank(), ud.size(), before, "eager", seed=3)
        if folder:
            ud.load(folder, model, bound)
        _train(model, bound, ud.rank(), ud.size(), steps, "eager", seed=2)
        return weights(model)


def refusals() -> None:
    """Check on this rank what stores do not have."""
    with unidist_with("parameter_server=sync"):
        for optimizer, complaint in (
            (keras.optimizers.Nadam(0.01), r"SGD, Adagrad, Adam, AdamW in its store, and not Nadam\. Add push=delta"),
            (keras.optimizers.Adam(0.01, amsgrad=True), "does not have Adam with amsgrad in its store"),
            (keras.optimizers.SGD(0.01, clipnorm=1.0, use_ema=True), "does not have SGD with clipnorm and use_ema"),
        ):
            with pytest.raises(ConfigurationError, match=complaint):
                ud.distribute(made(), optimizer)
        inputs = keras.Input((WIDTH,), dtype="float64")
        layer = keras.layers.Dense(3, kernel_constraint="unit_norm", dtype="float64")
        model, bound = ud.distribute(keras.Model(inputs, layer(inputs)), keras.optimizers.SGD(0.1))
        with pytest.raises(ConfigurationError, match="has a constraint, which parameter_server does not have"):
            _train(model, bound, ud.rank(), ud.size(), 1, "eager")


def changed_variables() -> None:
    """Check on this rank what becomes of variables that the script changes."""
    for strategy in ("sync", "async"):
        with unidist_with(f"parameter_server={strategy}"):
            model, bound = ud.distribute(made(), keras.optimizers.SGD(0.01))
            _train(model, bound, ud.rank(), ud.size(), 1, "eager")
            ud.barrier()
            model.set_weights([np.full_like(each, 2.0) for each in model.get_weights()])
            if strategy == "async":
                with pytest.raises(UsageError, match=r"changed variable .* on rank \d, but"):
                    _train(model, bound, ud.rank(), ud.size(), 1, "eager")
                ud.barrier()
                continue
            _train(model, bound, ud.rank(), ud.size(), 1, "eager")
            assert all((abs(each - 2.0) < 0.5).all() for each in model.get_weights())


def a_fast_rank_does_not_wait() -> None:
    """Check that rank 0 makes its steps while rank 1 makes none, and what `evaluate` begins with."""
    with unidist_with("parameter_server=async"):
        step = ud.TrainStep(made(), keras.optimizers.SGD(0.05), keras.losses.MeanSquaredError())
        inputs, targets = np.ones((4, WIDTH)), np.ones((4, CLASSES))
        step(inputs, targets)
        if ud.rank() == 1:
            ud.barrier()
        losses = [float(step(inputs, targets)) for _ in range(5)]
        assert losses[-1] < losses[0]
        if ud.rank() == 0:
            ud.barrier()
        ud.barrier()
        step.evaluate(inputs, targets)
        both = ud.allgather(tf.reshape(step.model.trainable_variables[0], [1, -1]))
        assert np.array_equal(both[0], both[1])
