"""Losses that are weighted by what counts: Keras on JAX has the numbers of one process on padded rows."""

from __future__ import annotations

import pytest
from part_pools import PartPools
from weighted_cases import check, check_far
from weights_keras import Case, errors_of, of_nothing

pytestmark = pytest.mark.parallel

CASES = (
    Case("data"),
    Case("zero=2"),
    Case("accumulate=4", 4),
    Case("zero=2,accumulate=2", 2),
    Case("data", way="loop"),
    Case("accumulate=2", 2, "loop"),
)


@pytest.fixture(scope="module")
def rank_pools(jax_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return jax_pools


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_numbers_of_one_process(jax_pools: PartPools, ranks: int) -> None:
    check(CASES, jax_pools.get(ranks).run(errors_of, (CASES,)))


def test_means_of_means_are_others(jax_pools: PartPools) -> None:
    cases = [Case(case.line, case.passes, case.way, weighted=False) for case in CASES if case.way == "step"]
    check_far(cases, jax_pools.get(2).run(errors_of, (cases,)))


def test_a_batch_in_which_nothing_counts_changes_nothing(jax_pools: PartPools) -> None:
    assert jax_pools.get(2).run(of_nothing, ("data",)) == [(0.0, 0.0)] * 2
