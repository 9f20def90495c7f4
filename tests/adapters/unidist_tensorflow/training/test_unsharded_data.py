"""`fit` says so if every rank trains on all of the data, and is quiet if it cannot know."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from _keras_training import runtime

import unidist.keras as ud
from unidist.jobs.pool.pool import RankPool
from unidist.settings.environment import set_variables

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel
SIZE = 32


def _model() -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer: Any = keras.optimizers.SGD(0.01)
    model, optimizer = ud.distribute(model, optimizer)
    model.compile(optimizer, loss="mse", jit_compile=False)
    return model


@contextmanager
def _warnings() -> Iterator[list[str]]:
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    keep = Keep()
    logger = logging.getLogger("unidist.training")
    logger.addHandler(keep)
    try:
        yield found
    finally:
        logger.removeHandler(keep)


def _data() -> tuple[Any, Any]:
    x = np.arange(2.0 * SIZE, dtype=np.float32).reshape(SIZE, 2) / SIZE
    return x, x.sum(axis=1, keepdims=True)


def test_whole_data_on_every_rank_is_a_warning_once_on_rank_0(pool: Pool) -> None:
    def on_rank() -> None:
        x, y = _data()
        whole = tf.data.Dataset.from_tensor_slices((x, y))
        cases: list[tuple[Any, ...]] = [
            (x, y),
            (tf.constant(x), tf.constant(y)),
            (whole.batch(8),),
            (whole.map(lambda a, b: (a * 2, b)).shuffle(SIZE).batch(8, num_parallel_calls=2).prefetch(1),),
            (whole.take(16).cache().repeat(2).batch(8),),
        ]
        for case in cases:
            with runtime(), _warnings() as found:
                leads = ud.rank() == 0
                model = _model()
                for _ in range(2):
                    model.fit(*case, verbose=0)
            assert len(found) == leads, found
            assert all("on all 2 ranks" in text and "ud.shard" in text for text in found)

    pool(2, "shm").run(on_rank)


def test_data_that_is_divided_or_cannot_be_told_is_no_warning(pool: Pool) -> None:
    def on_rank() -> None:
        x, y = _data()
        with runtime():
            rank, size = ud.rank(), ud.size()
        whole = tf.data.Dataset.from_tensor_slices((x, y))
        part = slice(rank * SIZE // size, (rank + 1) * SIZE // size)
        cases: list[Any] = [
            lambda: ((x[part], y[part]), {}),
            lambda: ((x[rank::size], y[rank::size]), {}),
            lambda: ((ud.shard(whole, batch_size=4),), {}),
            lambda: ((ud.shard(whole).map(lambda a, b: (a, b)).batch(4).prefetch(1),), {}),
            lambda: ((whole.shard(size, rank).batch(4),), {}),
            lambda: ((whole.skip(part.start).take(SIZE // size).batch(4),), {}),
            lambda: ((tf.data.Dataset.from_tensor_slices((x[part], y[part])).batch(4),), {}),
            lambda: ((tf.data.Dataset.range(SIZE).map(lambda i: (x[:1][0], y[:1][0])).batch(4),), {}),
            lambda: ((whole.repeat().shuffle(SIZE).batch(4),), {"steps_per_epoch": 4}),
        ]
        for number, case in enumerate(cases):
            with runtime(), _warnings() as found:
                data, options = case()
                _model().fit(*data, verbose=0, **options)
            assert not found, number

    pool(2, "shm").run(on_rank)


def test_ranks_that_hold_parts_of_one_model_train_on_the_same_data(pool: Pool) -> None:
    def on_rank() -> None:
        with set_variables({"UNIDIST_STRATEGY": "tensor=2"}), runtime(), _warnings() as found:
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(4), keras.layers.Dense(1)])
            model, optimizer = ud.distribute(model, keras.optimizers.SGD(0.01))
            model.compile(optimizer, loss="mse", jit_compile=False)
            model.fit(*_data(), verbose=0)
        assert not found

    pool(2, "shm").run(on_rank)
