"""Every element of a cut parameter is on exactly one rank, heads stay whole, sizes need not divide."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidist.errors import ConfigurationError
from unidist_tensor_parallel.layout.cuts import Cut, Heads, even, split_counts


@given(st.integers(1, 6), st.integers(0, 20), st.integers(1, 5), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_each_index_of_a_dim_is_on_one_rank(size: int, more: int, unit: int, factors: list[int]) -> None:
    totals = [(size * factor + more) * unit for factor in factors]
    cut = Cut.of(0, totals, size, units=[unit] * len(totals))
    found = list(itertools.chain.from_iterable(cut.indices(rank) for rank in range(size)))
    assert sorted(found) == list(range(sum(totals)))
    assert cut.counts == tuple(len(cut.indices(rank)) for rank in range(size))
    assert all(count % unit == 0 for block in cut.blocks for count in block)
    assert max(cut.counts) - min(cut.counts) <= unit * len(totals)


def test_first_ranks_have_more_where_sizes_do_not_divide() -> None:
    assert split_counts(7, 3) == (3, 2, 2)
    assert split_counts(10, 4, unit=2) == (4, 2, 2, 2)


def test_more_ranks_than_units_is_an_error_that_says_what_to_use() -> None:
    with pytest.raises(
        ConfigurationError, match=r"tensor=4 cannot cut the heads of blocks\.0: there are only 3.*tensor=3"
    ):
        split_counts(24, 4, unit=8, what="the heads of blocks.0")
    with pytest.raises(ConfigurationError, match="do not divide"):
        split_counts(10, 2, unit=3)


def test_boxes_lie_side_by_side_along_the_dim() -> None:
    cut = Heads(heads=3, kv_heads=3, width=2, size=2).fused(-2)
    assert cut.boxes((18, 5), 0) == (((0, 4), (0, 5)), ((6, 10), (0, 5)), ((12, 16), (0, 5)))
    assert cut.boxes((18, 5), 1) == (((4, 6), (0, 5)), ((10, 12), (0, 5)), ((16, 18), (0, 5)))
    assert cut.whole_shape((6, 5)) == (18, 5)
    assert even(1, 6, 3).boxes((4, 6), 2) == (((0, 4), (4, 6)),)
    with pytest.raises(ConfigurationError, match="does not have 6"):
        even(0, 6, 3).boxes((4, 6), 0)


def test_query_heads_stay_with_the_key_heads_that_they_share() -> None:
    heads = Heads(heads=6, kv_heads=3, width=4, size=2)
    assert [heads.local_heads(rank) for rank in range(2)] == [4, 2]
    assert [heads.local_kv_heads(rank) for rank in range(2)] == [2, 1]
    assert [heads.first_head(rank) for rank in range(2)] == [0, 4]
    assert heads.queries(0).counts == (16, 8)
    assert heads.keys(0).counts == (8, 4)
    assert heads.fused(0).ranges(1) == ((16, 24), (32, 36), (44, 48))
    with pytest.raises(ConfigurationError, match="do not share"):
        Heads(heads=6, kv_heads=4, width=4, size=2)
    with pytest.raises(ConfigurationError, match="there are only 2"):
        Heads(heads=8, kv_heads=2, width=4, size=4)
