"""Running statistics and other variables without a gradient: Keras on JAX has those of one process."""

from __future__ import annotations

import pytest
from part_pools import PartOfPool
from statistics_keras import CASES, on_rank, sums_share_statistics

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_ranks_share_what_training_changes(two: PartOfPool, case: tuple[str, str]) -> None:
    two.run(on_rank, ([case],))


def test_statistics_are_means_where_gradients_are_sums(two: PartOfPool) -> None:
    two.run(sums_share_statistics)
