"""Units are cut into stages so that the most expensive one is as cheap as can be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidist.errors import ConfigurationError
from unidist_pipeline.execution.balance import cut_evenly


def stages(costs: list[float], cuts: list[int]) -> list[float]:
    return [sum(costs[start:stop]) for start, stop in itertools.pairwise([0, *cuts, len(costs)])]


@given(st.lists(st.integers(0, 9).map(float), min_size=1, max_size=9), st.integers(1, 9))
def test_no_other_cut_is_better(costs: list[float], num_stages: int) -> None:
    if num_stages > len(costs):
        return
    cuts = cut_evenly(costs, num_stages)
    assert cuts == sorted(set(cuts))
    others = itertools.combinations(range(1, len(costs)), num_stages - 1)
    assert max(stages(costs, cuts)) == min(max(stages(costs, list(other))) for other in others)


def test_equal_units_make_equal_stages() -> None:
    assert cut_evenly([1.0] * 12, 4) == [3, 6, 9]


def test_among_equals_less_passes_between_stages() -> None:
    assert cut_evenly([1, 0, 0, 1], 2, [0, 2, 1, 3]) == [2]


def test_fewer_units_than_stages_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="2 units do not make 3 stages"):
        cut_evenly([1, 1], 3)
