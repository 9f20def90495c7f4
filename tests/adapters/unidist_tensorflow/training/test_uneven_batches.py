"""Ranks with batches of different size: Keras on TensorFlow has the numbers of one process on the whole batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from uneven_keras import CASES, on_rank

from unidist.jobs.pool.pool import RankPool

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_samples_weigh_alike(pool: Callable[..., RankPool], case: tuple[str, str, str]) -> None:
    pool(2, "shm").run(on_rank, ([case],))
