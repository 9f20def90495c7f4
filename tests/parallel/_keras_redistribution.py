"""A network of Keras that is trained under any strategy line and redistributed, for ranks of a pool."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np

import unidist.keras as ud
from unidist.checkpoint import redistribution
from unidist.errors import UnidistError
from unidist.settings.environment import set_variables

BATCH, FEATURES, CLASSES = 8, 6, 4
Values = Mapping[str, Any]


def network(seed: int = 0) -> Any:
    """Return a network of these values."""
    keras.utils.set_random_seed(seed)
    layers: Any = [
        keras.Input((FEATURES,), dtype="float64"),
        keras.layers.Dense(16, activation="tanh", dtype="float64"),
        keras.layers.Dense(8, dtype="float64"),
        keras.layers.BatchNormalization(dtype="float64"),
        keras.layers.Dense(CLASSES, dtype="float64"),
    ]
    return keras.Sequential(layers)


def train(step: Any, number: int) -> None:
    """Take a step on this rank's samples."""
    generator = np.random.default_rng(number)
    x, y = generator.normal(size=(BATCH, FEATURES)), generator.integers(CLASSES, size=BATCH)
    mine = slice(ud.data_rank(), None, ud.data_size())
    step(x[mine], y[mine])


def weights_of(model: Any) -> list[Any]:
    """Return the values of all weights."""
    return [np.array(each) for each in model.get_weights()]


def are_equal(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Return whether weights are the same to the last bit."""
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


def wrong(lines: Sequence[str], folder: str) -> dict[str, list[str] | str]:
    """Train under each line and redistribute; return what differs from a save and a load, or the error."""
    found: dict[str, list[str] | str] = {}
    for number, line in enumerate(lines):
        with set_variables({"UNIDIST_STRATEGY": line, "UNIDIST_ENGINE": "shm"}):
            ud.init()
            try:
                found[line] = _wrong(Path(folder) / str(number))
            except Exception:
                found[line] = traceback.format_exc(limit=-6)
            finally:
                ud.shutdown()
    return found


def _wrong(folder: Path) -> list[str]:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = ud.TrainStep(network(), keras.optimizers.Adam(0.05), loss)
    for number in range(2):
        train(step, number)
    ud.save(folder / "trained", step.model)
    loaded = network(1)
    ud.load(folder / "trained", loaded)
    expected = weights_of(loaded)
    assert not are_equal(weights_of(network()), expected)
    whole, last = network(2), ud.size() - 1
    with mock.patch.object(redistribution, "ROUND_BYTES", 200):
        assert ud.redistribute(step.model, to=whole) is None
    checks = {"all ranks": are_equal(weights_of(whole), expected)}
    arrays = ud.redistribute(step.model, to=[last])
    if ud.rank() == last:
        assert arrays is not None
        checks["one rank"] = are_equal(sorted(map(_key, arrays.values())), sorted(map(_key, expected)))
    else:
        checks["one rank"] = arrays is None
    alone = network(3) if ud.rank() == 0 else None
    ud.redistribute(step.model, to=alone)
    checks["a model on one rank"] = alone is None or are_equal(weights_of(alone), expected)
    train(step, 2)  # training goes on
    given = network(4)
    with mock.patch.object(redistribution, "ROUND_BYTES", 200):
        ud.redistribute(given if ud.rank() == last else None, to=step.model)
    ud.redistribute(step.model, to=whole)
    checks["from one rank"] = are_equal(weights_of(whole), weights_of(given))
    train(step, 3)
    return [name for name, is_right in checks.items() if not is_right]


def _key(array: Any) -> list[float]:
    return [float(each) for each in np.ravel(array)]


def refused() -> list[str]:
    """Ask for what cannot be; return the messages."""
    with set_variables({"UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            model, other = network(), keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            return [_text(model, other), _text(model, "zero=3"), _text(model, None)]
        finally:
            ud.shutdown()


def _text(model: Any, to: Any) -> str:
    try:
        ud.redistribute(model, to=to)
    except UnidistError as error:
        return f"{type(error).__name__}: {error}"
    return ""
