"""Running statistics and other variables without a gradient: Keras on TensorFlow has those of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from statistics_keras import CASES, alone_under_local_sgd, on_rank, sums_share_statistics, synchronized

from unidist.jobs.pool.pool import RankPool

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_ranks_share_what_training_changes(pool: Callable[..., RankPool], case: tuple[str, str]) -> None:
    pool(2, "shm").run(on_rank, ([case],))


def test_ranks_that_step_alone_share_nothing(pool: Callable[..., RankPool]) -> None:
    pool(2, "shm").run(alone_under_local_sgd)


@pytest.mark.parametrize(("way", "late"), [("fit", False), ("TrainStep", False), ("fit", True)])
def test_keras_own_synchronized_norm_is_over_all_ranks(pool: Callable[..., RankPool], way: str, late: bool) -> None:
    pool(2, "shm").run(synchronized, (way,), {"late": late})


def test_statistics_are_means_where_gradients_are_sums(pool: Callable[..., RankPool]) -> None:
    pool(2, "shm").run(sums_share_statistics)
