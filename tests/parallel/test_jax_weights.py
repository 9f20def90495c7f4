"""Losses in JAX that are weighted by what counts: a GPT on padded rows has the numbers of one process."""

from __future__ import annotations

import pytest
from part_pools import PartPools
from weighted_cases import check, check_far

pytest.importorskip("jax", reason="the training is in JAX")

from weights_jax import PLAN, Case, errors_of, of_nothing, refused

pytestmark = [pytest.mark.parallel, pytest.mark.soak]  # minutes on 2 cores

CASES = {
    2: (
        Case("data"),
        Case("zero=2"),
        Case("zero=3"),
        Case("pipeline=2:microbatches=2"),
        Case("accumulate=4", 4),
        Case("zero=2,accumulate=2", 2),
        Case(f"tensor=2:plan={PLAN},accumulate=2", 2),
        Case("context=2,accumulate=2", 2),
        Case("data", way="loop"),
        Case("accumulate=2", 2, "loop"),
    ),
    4: (
        Case("data"),
        Case("zero=2"),
        Case("zero=3"),
        Case("pipeline=2:microbatches=2"),
        Case(f"tensor=2:plan={PLAN}"),
        Case("context=2"),
        Case("accumulate=4", 4),
    ),
}


@pytest.fixture(scope="module")
def rank_pools(jax_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return jax_pools


@pytest.mark.parametrize("ranks", CASES)
def test_the_numbers_of_one_process(jax_pools: PartPools, ranks: int) -> None:
    check(CASES[ranks], jax_pools.get(ranks).run(errors_of, (CASES[ranks],)))


def test_means_of_means_are_others(jax_pools: PartPools) -> None:
    cases = [
        Case(case.line, case.passes, case.way, weighted=False)
        for case in CASES[2]
        if case.way == "step" and "context" not in case.line
    ]
    check_far(cases, jax_pools.get(2).run(errors_of, (cases,)))


def test_a_weight_that_is_negative_is_an_error_on_every_rank(jax_pools: PartPools) -> None:
    first, second = jax_pools.get(2).run(refused, ([-1.0, 3.0],))
    assert all("that of this rank is -1.0" in text for text in first), first
    assert all("that of another rank is negative or not finite" in text for text in second), second


@pytest.mark.parametrize("line", ["data", "pipeline=2:microbatches=2"])
def test_a_batch_in_which_nothing_counts_changes_nothing(jax_pools: PartPools, line: str) -> None:
    assert jax_pools.get(2).run(of_nothing, (line,)) == [(0.0, 0.0)] * 2
