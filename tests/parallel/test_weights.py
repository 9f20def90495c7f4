"""Losses that are weighted by what counts: a GPT on padded rows has the numbers of one process, under each strategy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from part_pools import PartPools
from weighted_cases import check, check_far

pytest.importorskip("torch", reason="the training is in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _torch_weights import Case, errors_of, of_nothing, refused

pytestmark = pytest.mark.parallel

CASES = {
    2: (
        Case("data"),
        Case("zero=2"),
        Case("zero=3"),
        Case("pipeline=2:microbatches=2"),
        Case("accumulate=4", 4),
        Case("zero=2,accumulate=2", 2),
        Case("tensor=2,accumulate=2", 2),
        Case("context=2,accumulate=2", 2),
        Case("data", way="loop"),
        Case("zero=3", way="loop"),
        Case("accumulate=2", 2, "loop"),
        Case("data", 3, "loop"),
        Case("data", 3, "no_sync"),
        Case("zero=1", 3, "loop"),
        Case("zero=2", 3, "loop"),
        Case("zero=2", 3, "no_sync"),
    ),
    4: (
        Case("data"),
        Case("zero=2"),
        Case("zero=3"),
        Case("pipeline=2:microbatches=2"),
        Case("context=2"),
        Case("tensor=2"),
        Case("accumulate=4", 4),
        Case("pipeline=2:microbatches=2,zero=2,accumulate=2", 2),
        Case("context=2", way="loop"),
    ),
}


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return torch_pools


@pytest.mark.parametrize("ranks", CASES)
def test_the_numbers_of_one_process(torch_pools: PartPools, ranks: int) -> None:
    check(CASES[ranks], torch_pools.get(ranks).run(errors_of, (CASES[ranks],)))


@pytest.mark.parametrize("ranks", CASES)
def test_means_of_means_are_others(torch_pools: PartPools, ranks: int) -> None:
    cases = [Case(case.line, case.passes, case.way, weighted=False) for case in CASES[ranks] if case.way == "step"]
    check_far(cases, torch_pools.get(ranks).run(errors_of, (cases,)))


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_an_error_on_every_rank(torch_pools: PartPools, weight: float) -> None:
    first, second = torch_pools.get(2).run(refused, ([weight, 3.0],))
    assert len(first) == len(second) == 3
    assert all(f"that of this rank is {weight}" in text for text in first), first
    assert all("that of another rank is negative or not finite" in text for text in second), second


@pytest.mark.parametrize("line", ["data", "zero=3", "pipeline=2:microbatches=2"])
def test_a_batch_in_which_nothing_counts_changes_nothing(torch_pools: PartPools, line: str) -> None:
    assert torch_pools.get(2).run(of_nothing, (line,)) == [(0.0, 0.0)] * 2
