"""Trainings by `fit` of Keras that end early on rank 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

import unidist.keras as ud
from unidist.errors import UnidistError

STEPS = 6


class _Ending(keras.callbacks.Callback):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if ud.rank() == 1 and batch == 3:
            if self._kind == "exception":
                raise ValueError("the callback is broken")
            if self._kind == "stop":
                raise StopIteration


def _batches(count: int) -> Iterator[tuple[Any, Any]]:
    for _ in range(count):
        yield np.ones((2, 4), "float32"), np.ones((2, 3), "float32")


def error_of(kind: str) -> str:
    """Train; return the kind of the error, and its text with its notes. A rank's runtime ends as its script does."""
    ud.init()
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model, optimizer = ud.distribute(model, keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", jit_compile=keras.backend.backend() == "jax")
    count = STEPS - 2 * ud.rank() if kind == "fewer batches" else STEPS
    try:
        try:
            model.fit(_batches(count), steps_per_epoch=count, verbose=0, callbacks=[_Ending(kind)])
        finally:
            ud.shutdown()
    except (UnidistError, ValueError, StopIteration) as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return ""


def check(kind: str, told: list[str]) -> None:
    """Check the texts of two ranks."""
    first, second = told
    assert len(first.splitlines()) < 10, first
    if kind != "exception":  # Keras takes StopIteration for the end of the data
        for text in told:
            assert "rank 1 waits in the end of epoch 1 of fit, after 4 updates" in text
            assert "give fit as many on each: data of ud.shard, or steps_per_epoch" in text
        return
    assert first.startswith("PeerLost"), first
    assert second == "ValueError: the callback is broken"
    assert "rank 1 has ended after 4 updates with ValueError: the callback is broken. Rank 0 waits in" in first
    assert "ud.join()" not in first
