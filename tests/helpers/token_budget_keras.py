"""A small language model in Keras, on TensorFlow or JAX, on batches that fill a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from token_budget_cases import ARGUMENTS, COUNT, IGNORED, VOCABULARY, numbers, padded, sample
from uneven_keras import COMPILED, computing_in

import unidist.keras as ud
from unidist.settings.environment import set_variables

EPOCHS = 2
L = keras.layers


def make() -> Any:
    """Return the model, with the same values everywhere."""
    keras.utils.set_random_seed(5)
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    x = L.Embedding(VOCABULARY, 8, name="words")(tokens)
    return keras.Model(tokens, L.Dense(VOCABULARY, name="scores")(L.Dense(16, "tanh", name="hidden")(x)))


def loss_of(targets: Any, outputs: Any) -> Any:
    """Return the mean over what counts."""
    ops = keras.ops
    kept = ops.cast(targets != IGNORED, "float64")
    losses = keras.losses.sparse_categorical_crossentropy(ops.maximum(targets, 0), outputs, from_logits=True)
    return ops.sum(losses * kept) / ops.sum(kept)


def count(targets: Any) -> Any:
    """Return the number of tokens that count."""
    return keras.ops.sum(keras.ops.cast(targets != IGNORED, "int32"))


def _data() -> Any:
    return ud.shard([sample(index) for index in range(COUNT)], collate=padded, **ARGUMENTS)


def trained(line: str, *, weighted: bool = True) -> tuple[list[float], list[list[int]]]:
    """Train by `TrainStep` in a loop; return the losses, and the samples of this rank in each step."""
    variables = {"UNIDIST_STRATEGY": line, "UNIDIST_ENGINE": "shm", "UNIDIST_VERIFY": "off"}
    with set_variables(variables), computing_in("float64"):
        step = ud.TrainStep(make(), _optimizer(), loss_of, weight=count if weighted else None)
        losses, seen = [], []
        data = _data()
        for _ in range(EPOCHS):
            for tokens, targets in data:
                seen.append(numbers(tokens))
                losses.append(float(step(tokens, targets)))
        return losses, seen


def fitted() -> tuple[list[Any], list[list[int]]]:
    """Train by `fit`; return the weights, and this rank's samples in each step."""
    with set_variables({"UNIDIST_ENGINE": "shm"}), computing_in("float64"):
        model, optimizer = ud.distribute(make(), _optimizer())
        model.compile(optimizer, _ignoring(), jit_compile=COMPILED)
        model.fit(_data(), epochs=EPOCHS, verbose=0)
        data = _data()
        seen = [numbers(tokens) for _ in range(EPOCHS) for tokens, _ in data]
        return [np.array(each) for each in model.get_weights()], seen


def fitted_alone(steps: Sequence[Sequence[int]]) -> list[Any]:
    """Return the weights after training in one process, without unidist, on these samples in each step."""
    with computing_in("float64"):
        model = make()
        model.compile(_optimizer(), _ignoring(), jit_compile=COMPILED)
        for indices in steps:
            model.train_on_batch(*padded([sample(index) for index in indices]))
        return [np.array(each) for each in model.get_weights()]


def alone(steps: Sequence[Sequence[int]]) -> list[float]:
    """Return the losses of one process, without unidist, that trains on these samples in each step."""
    losses = []
    with computing_in("float64"):
        model = make()
        model.compile(_optimizer(), loss_of, jit_compile=COMPILED)
        for indices in steps:
            losses.append(float(model.train_on_batch(*padded([sample(index) for index in indices]))))
            model.reset_metrics()
    return losses


def _optimizer() -> Any:
    return keras.optimizers.SGD(0.25, momentum=0.5)


def _ignoring() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=IGNORED)
