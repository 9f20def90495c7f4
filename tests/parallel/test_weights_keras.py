"""Losses in Keras on TensorFlow that are weighted by what counts: a GPT on padded rows has one process' numbers."""

from __future__ import annotations

import pytest
from part_pools import PartPools
from weighted_cases import check, check_far

pytest.importorskip("tensorflow", reason="the training is in Keras")

from weights_keras import Case, errors_of, of_nothing

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
        Case("data", way="loop"),
        Case("accumulate=2", 2, "loop"),
    ),
    4: (
        Case("data"),
        Case("zero=2"),
        Case("zero=3"),
        Case("pipeline=2:microbatches=2"),
        Case("tensor=2"),
        Case("context=2"),
        Case("accumulate=4", 4),
    ),
}


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return tensorflow_pools


@pytest.mark.parametrize("ranks", CASES)
def test_the_numbers_of_one_process(tensorflow_pools: PartPools, ranks: int) -> None:
    check(CASES[ranks], tensorflow_pools.get(ranks).run(errors_of, (CASES[ranks],)))


def test_means_of_means_are_others(tensorflow_pools: PartPools) -> None:
    cases = [Case(case.line, case.passes, case.way, weighted=False) for case in CASES[2] if case.way == "step"]
    check_far(cases, tensorflow_pools.get(2).run(errors_of, (cases,)))


@pytest.mark.parametrize("line", ["data", "pipeline=2:microbatches=2"])
def test_a_batch_in_which_nothing_counts_changes_nothing(tensorflow_pools: PartPools, line: str) -> None:
    assert tensorflow_pools.get(2).run(of_nothing, (line,)) == [(0.0, 0.0)] * 2
