"""Metrics of Keras in a loop of the script's own: those of one process on the samples of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from _keras_training import runtime

import unidist.keras as ud
from unidist.errors import MismatchError, UsageError
from unidist.jobs.pool.pool import RankPool

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel
KINDS: dict[str, Callable[[], Any]] = {
    "auc": lambda: keras.metrics.AUC(num_thresholds=50),
    "accuracy": keras.metrics.BinaryAccuracy,
    "mean": keras.metrics.Mean,
    "root": keras.metrics.RootMeanSquaredError,
    "f1": lambda: keras.metrics.F1Score(threshold=0.5),
    "r2": keras.metrics.R2Score,
}


def samples() -> tuple[Any, Any]:
    generator = np.random.default_rng(3)
    truth = generator.integers(0, 2, size=(50, 1)).astype("float32")
    return truth, np.clip(0.3 * truth + generator.uniform(0, 0.7, size=(50, 1)), 0, 1).astype("float32")


def update(kind: str, metric: Any, rows: slice) -> None:
    truth, guessed = samples()
    metric.update_state(*([guessed[rows]] if kind == "mean" else [truth[rows], guessed[rows]]))


def test_results_are_those_of_all_samples_and_uneven_shares_count_as_they_are(pool: Pool) -> None:
    def on_rank() -> list[Any]:
        with runtime("float32"):
            found = []
            made = ud.metrics({kind: make() for kind, make in KINDS.items()})
            for kind, metric in made.items():
                half = slice(0, 20) if ud.rank() else slice(20, 35)
                update(kind, metric, half)
                first = np.asarray(metric.result()).tolist()
                update(kind, metric, slice(35, 50) if ud.rank() == 0 else slice(0, 0))  # it goes on with its own
                found.append((first, np.asarray(metric.result()).tolist()))
            return found

    wanted = []
    for kind, make in KINDS.items():
        first, last = make(), make()
        update(kind, first, slice(0, 35))
        update(kind, last, slice(0, 50))
        wanted.append((np.asarray(first.result()).tolist(), np.asarray(last.result()).tolist()))
    for found in pool(2).run(on_rank):
        for (first, last), (first_wanted, last_wanted) in zip(found, wanted, strict=True):
            np.testing.assert_allclose(first, first_wanted, rtol=1e-6)
            np.testing.assert_allclose(last, last_wanted, rtol=1e-6)


def test_what_cannot_be_right_is_refused(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime("float32"):
            with pytest.raises(UsageError, match="is no metric of Keras"):
                ud.metrics(keras.losses.MeanSquaredError())
            mean = ud.metrics(keras.metrics.Mean())
            with pytest.raises(UsageError, match="traced"):
                tf.function(lambda: mean.result(), autograph=False)()
            late = ud.metrics(keras.metrics.R2Score())
            if ud.rank() == 0:
                update("r2", late, slice(0, 5))
            with pytest.raises(MismatchError, match=r"rank 0 of 2: \d+, rank 1 of 2: \d+ numbers"):
                late.result()

    pool(2).run(on_rank)
