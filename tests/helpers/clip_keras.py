"""Trainings in Keras whose gradients are clipped: over ranks by a strategy, and in one process by formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import unidist.tensorflow as ud
from unidist.settings.environment import set_variables
from unidist_tensorflow.training.conformance import computing_in_float64

STEPS, BATCH, ROWS, WIDTH, CLASSES, RATE = 5, 12, 20, 5, 3, 0.5


ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
"""Where a rank of a pool is: in a world of its own. One process less is started for a world of one rank."""


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        strategy: the strategy line.
        clip: pairs of "norm" with limit and order, or "value" with the limit, in their order.
        mode: "eager", "function", "fit" or "tape" (a DistributedGradientTape).
        passes: calls of `apply` that make one update.
    """

    strategy: str
    clip: tuple[tuple[str, tuple[float, ...]], ...]
    mode: str = "eager"
    passes: int = 1


class Model(keras.Model):
    """Rows of a table, whose gradients are slices, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        generator = np.random.default_rng(0)

        def weight(name: str, *shape: int) -> Any:
            values = generator.standard_normal(shape)
            return self.add_weight(shape, initializer=lambda shape, dtype: ops.cast(values, dtype), name=name)

        self.table = weight("table", ROWS, WIDTH)
        self.inner = weight("inner", WIDTH, 7)
        self.head = weight("head", 7, CLASSES)
        self.built = True

    def call(self, words: Any) -> Any:
        rows = tf.reduce_sum(tf.gather(self.table.value, tf.cast(words, tf.int64)), 1)
        return ops.tanh(rows @ self.inner.value) @ self.head.value

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
    ) -> Any:
        return ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred * 3, from_logits=True))


def train_over_ranks(cases: Sequence[Case], *, alone: bool = False) -> list[dict[str, Any]]:
    """Train with unidist, one case after another, or each rank alone with it; return the variables of each."""
    results = []
    place = {f"UNIDIST_{name}": value for name, value in ALONE.items()} if alone else {}
    for case in cases:
        with set_variables({"UNIDIST_STRATEGY": case.strategy, **place}), computing_in_float64():
            ud.init()
            try:
                model: Any = Model()
                optimizer: Any = keras.optimizers.SGD(RATE)
                if case.mode != "tape":
                    model, optimizer = ud.distribute(model, optimizer)
                passes = [
                    batch
                    for words, labels in _windows(case, ud.rank(), ud.size())
                    for batch in zip(np.split(words, case.passes), np.split(labels, case.passes), strict=True)
                ]
                _train(model, optimizer, passes, case.mode)
            finally:
                ud.shutdown()
        results.append(_values(model))
    return results


def train_in_one_process(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Train without unidist on everything: whole windows are one batch."""
    results = []
    for case in cases:
        with computing_in_float64():
            model = Model()
            for words, labels in _windows(case, 0, 1):
                with tf.GradientTape() as tape:
                    loss = model.compute_loss(words, labels, model(words))
                gradients = tape.gradient(loss, model.trainable_variables)
                dense = [np.array(tf.convert_to_tensor(gradient)) for gradient in gradients]
                for variable, gradient in zip(model.trainable_variables, _clipped(dense, case.clip), strict=True):
                    variable.assign_sub(RATE * gradient)
        results.append(_values(model))
    return results


def _clipped(gradients: list[Any], clip: Sequence[tuple[str, tuple[float, ...]]]) -> list[Any]:
    for kind, arguments in clip:
        if kind == "value":
            gradients = [np.clip(gradient, -arguments[0], arguments[0]) for gradient in gradients]
        else:
            limit, order = arguments
            norm = np.linalg.norm(np.concatenate([gradient.ravel() for gradient in gradients]), order)
            gradients = [gradient * min(1.0, limit / (norm + 1e-6)) for gradient in gradients]
    return gradients


def _train(model: Any, optimizer: Any, passes: list[tuple[Any, Any]], mode: str) -> None:
    if mode == "fit":
        model.compile(optimizer)
        words, labels = (np.concatenate(parts) for parts in zip(*passes, strict=True))
        model.fit(words, labels, batch_size=len(passes[0][0]), shuffle=False, verbose=0)
        return

    def step(words: Any, labels: Any) -> None:
        tape: Any = tf.GradientTape()
        if mode == "tape":
            tape = ud.DistributedGradientTape(tape)
        with tape:
            loss = optimizer.scale_loss(model.compute_loss(words, labels, model(words)))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    run = tf.function(step) if mode == "function" else step
    for words, labels in passes:
        run(tf.constant(words), tf.constant(labels))


def _windows(case: Case, rank: int, size: int) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(3)
    windows = []
    for _ in range(STEPS):
        words = rng.integers(0, ROWS, (BATCH * case.passes, 4))
        labels = rng.integers(0, CLASSES, BATCH * case.passes)
        windows.append((np.split(words, size)[rank], np.split(labels, size)[rank]))
    return windows


def _values(model: Any) -> dict[str, Any]:
    return {variable.name: np.array(variable.numpy()) for variable in model.weights}
