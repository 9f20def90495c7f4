"""Which ranks share a host, and who speaks to whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unidist.hierarchical.layout import Layout


def test_even_hosts_have_a_row_for_every_index() -> None:
    layout = Layout.of("aabb")
    assert layout.hosts == ((0, 1), (2, 3))
    assert layout.is_regular
    assert [layout.row(i) for i in range(layout.num_rows)] == [(0, 2), (1, 3)]


def test_ranks_that_alternate_between_hosts_keep_their_order_on_each() -> None:
    layout = Layout.of([7, 3, 7, 3, 3])
    assert layout.hosts == ((0, 2), (1, 3, 4))
    assert not layout.is_regular
    assert layout.num_rows == 2
    assert (layout.host_of(4), layout.index_of(4)) == (1, 2)
    assert not Layout.of("abab").is_regular
    assert not Layout.of("aab").is_regular


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 50))
def test_every_rank_stands_once_and_every_element_is_carried_once(host_of: list[int], count: int) -> None:
    layout = Layout.of(host_of)
    assert sorted(rank for ranks in layout.hosts for rank in ranks) == list(range(len(host_of)))
    for rank in range(len(host_of)):
        assert layout.hosts[layout.host_of(rank)][layout.index_of(rank)] == rank
    pieces = layout.pieces(count)
    assert sum(pieces) == count
    assert len(pieces) == layout.num_rows
    assert max(pieces) - min(pieces) <= 1
