"""Losses that are divided by what counts in a batch: Keras on TensorFlow has the numbers of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from counted_keras import CASES, on_rank

from unidist.jobs.pool.pool import RankPool

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_the_numbers_are_those_of_one_process(pool: Callable[..., RankPool], case: tuple[str, str]) -> None:
    pool(2, "shm").run(on_rank, case)
