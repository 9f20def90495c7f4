"""Trainings in Keras under `local_sgd` on ranks, and the same by copies of a model in one process without unidist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from clip_keras import CLASSES, ROWS, Model

import unidist.tensorflow as ud
from unidist.errors import UsageError
from unidist.settings.environment import set_variables
from unidist_tensorflow.training.conformance import computing_in_float64

BATCH = 4


@dataclass(frozen=True)
class Case:
    """One training.

    Args:
        line: the strategy line.
        every: H.
        after: updates whose gradients are averaged first.
        rate: of the outer optimizer, which is plain without a momentum.
        momentum: of the outer optimizer, Nesterov's.
        parts: the variables of each fragment.
        delay: updates between sending and applying.
        mix: weight of own values.
        mode: "eager", "function" or "fit".
        optimizer: "sgd" or "adam".
        steps: updates.
    """

    line: str
    every: int
    after: int = 0
    rate: float = 1.0
    momentum: float = 0.0
    parts: tuple[tuple[int, ...], ...] = ((0, 1, 2),)
    delay: int = 0
    mix: float = 0.0
    mode: str = "eager"
    optimizer: str = "sgd"
    steps: int = 9


def make_optimizer(case: Case) -> Any:
    """Return the inner optimizer."""
    return keras.optimizers.SGD(0.5) if case.optimizer == "sgd" else keras.optimizers.Adam(0.05)


def batches_of(case: Case, rank: int) -> list[tuple[Any, Any]]:
    """Return the batches of one rank."""
    random = np.random.default_rng(100 + rank)
    return [
        (random.integers(0, ROWS, (BATCH, 4)), random.integers(0, CLASSES, BATCH)) for _ in range(case.steps)
    ]  # fmt: skip


def values_of(model: Any) -> dict[str, Any]:
    """Return copies of the variables by name."""
    return {variable.name: np.array(variable.numpy()) for variable in model.weights}


def take_steps(model: Any, optimizer: Any, case: Case, batches: Sequence[tuple[Any, Any]]) -> None:
    """Train on these batches."""
    if case.mode == "fit":
        model.compile(optimizer)
        words, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        model.fit(words, labels, batch_size=BATCH, shuffle=False, verbose=0)
        return

    def step(words: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(words, labels, model(words))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    run = tf.function(step) if case.mode == "function" else step
    for words, labels in batches:
        run(tf.constant(words), tf.constant(labels))


def train(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Train each case on this rank; return its variables at the end."""
    found = []
    for case in cases:
        with set_variables({"UNIDIST_STRATEGY": case.line}), computing_in_float64():
            ud.init()
            try:
                model, optimizer = ud.distribute(Model(), make_optimizer(case))
                take_steps(model, optimizer, case, batches_of(case, ud.rank()))
                found.append(values_of(model))
            finally:
                ud.shutdown()
    return found


def simulate(cases: Sequence[Case], size: int) -> list[list[dict[str, Any]]]:
    """Return for each case what each of `size` ranks has at the end."""
    with computing_in_float64():
        return [_simulate(case, size) for case in cases]


def _simulate(case: Case, size: int) -> list[dict[str, Any]]:
    models = [Model() for _ in range(size)]
    optimizers = [make_optimizer(case) for _ in range(size)]
    batches = [batches_of(case, rank) for rank in range(size)]
    start = [np.array(variable) for variable in models[0].trainable_variables]
    speed = [np.zeros_like(each) for each in start]
    sent: dict[int, list[Any]] = {}
    for step in range(case.steps):
        gradients = []
        for model, own in zip(models, batches, strict=True):
            words, labels = own[step]
            with tf.GradientTape() as tape:
                loss = model.compute_loss(words, labels, model(words))
            gradients.append(
                [np.array(tf.convert_to_tensor(g)) for g in tape.gradient(loss, model.trainable_variables)]
            )
        if step < case.after:
            gradients = [[np.mean(each, axis=0) for each in zip(*gradients, strict=True)]] * size
        for model, optimizer, own_gradients in zip(models, optimizers, gradients, strict=True):
            optimizer.apply_gradients(zip(map(tf.constant, own_gradients), model.trainable_variables, strict=True))
        if step < case.after:
            start = [np.array(variable) for variable in models[0].trainable_variables]
            continue
        position = step + 1 - case.after
        for k, part in enumerate(case.parts):
            begin = -(-(k + 1) * case.every // len(case.parts))
            if position >= begin and (position - begin) % case.every == 0:
                sent[k] = [
                    start[i] - np.mean([np.array(model.trainable_variables[i]) for model in models], axis=0)
                    for i in part
                ]
            arrived = position - case.delay
            if arrived >= begin and (arrived - begin) % case.every == 0:
                for i, gradient in zip(part, sent.pop(k), strict=True):
                    speed[i] = case.momentum * speed[i] + gradient
                    start[i] = start[i] - case.rate * (gradient + case.momentum * speed[i])
                    for model in models:
                        own_value = np.array(model.trainable_variables[i])
                        model.trainable_variables[i].assign(case.mix * own_value + (1 - case.mix) * start[i])
    return [values_of(model) for model in models]


def save_and_resume(case: Case, folder: str) -> tuple[Any, Any]:
    """Save in the middle of a window; return what training on gives, and what a resumed one gives."""
    middle = case.steps // 2
    found = []
    with set_variables({"UNIDIST_STRATEGY": case.line}), computing_in_float64():
        for resumes in (False, True):
            ud.init()
            try:
                model, optimizer = ud.distribute(Model(), make_optimizer(case))
                batches = batches_of(case, ud.rank())
                if resumes:
                    ud.load(folder, model, optimizer)
                else:
                    take_steps(model, optimizer, case, batches[:middle])
                    ud.save(folder, model, optimizer)
                take_steps(model, optimizer, case, batches[middle:])
                found.append(values_of(model))
            finally:
                ud.shutdown()
    return found[0], found[1]


def fit_with_moving_averages() -> dict[str, Any]:
    """Let `fit` replace the variables by their moving averages, which differ between ranks; return the variables."""
    case = Case("local_sgd=4", 4, mode="fit")
    with set_variables({"UNIDIST_STRATEGY": case.line}), computing_in_float64():
        ud.init()
        try:
            model, optimizer = ud.distribute(Model(), keras.optimizers.SGD(0.5, use_ema=True))
            take_steps(model, optimizer, case, batches_of(case, ud.rank()))
            return values_of(model)
        finally:
            ud.shutdown()


def differentiate() -> str:
    """Use a tape that reduces gradients, without an optimizer; return the error."""
    with set_variables({"UNIDIST_STRATEGY": "local_sgd=4"}):
        ud.init()
        try:
            ud.DistributedGradientTape(tf.GradientTape())
        except UsageError as exc:
            return str(exc)
        finally:
            ud.shutdown()
        return "no error"
