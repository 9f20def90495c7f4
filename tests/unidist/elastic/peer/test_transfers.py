"""Who keeps copies, and what is left after losses: for any number of hosts and ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unidist.buffer import DType
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import TensorInfo
from unidist.checkpoint.format.writing import Identity
from unidist.elastic.peer.transfers import guards, lost_origins, places, twins

HOSTS = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(
    lambda sizes: [host for host, size in enumerate(sizes) for _ in range(size)]
)


def held(keepers: Sequence[int | None], survivors: Sequence[int]) -> list[set[int]]:
    """Return the origins that each of the survivors holds."""
    return [{rank, *(each for each, keeper in enumerate(keepers) if keeper == rank)} for rank in survivors]


@settings(max_examples=50, deadline=None)
@given(HOSTS)
def test_one_lost_rank_or_one_lost_host_of_several_loses_nothing(hosts: list[int]) -> None:
    keepers = guards(hosts)
    ranks = range(len(hosts))
    if len(hosts) == 1:
        assert keepers == [None]
        return
    for lost in ranks:
        assert lost_origins(held(keepers, [rank for rank in ranks if rank != lost]), [()] * len(hosts)) == []
    for host in set(hosts) if len(set(hosts)) > 1 else ():
        assert lost_origins(held(keepers, [rank for rank in ranks if hosts[rank] != host]), [()] * len(hosts)) == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8).map(sorted), st.data())
def test_whoever_leaves_loses_nothing(hosts: list[int], data: st.DataObject) -> None:
    leaving = data.draw(st.sets(st.integers(0, len(hosts) - 1), max_size=len(hosts) - 1))
    stay = [rank for rank in range(len(hosts)) if rank not in leaving]
    assert lost_origins(held(guards(hosts, leaving), stay), [()] * len(hosts)) == []


def test_copies_are_spread_evenly() -> None:
    assert guards([0, 0, 0, 0]) == [1, 2, 3, 0]
    assert guards([0, 0, 1, 1]) == [2, 3, 0, 1]
    assert guards([0, 0, 0, 1]) == [3, 3, 3, 0]
    assert lost_origins(held(guards([0, 0, 0, 0]), [0, 3]), [()] * 4) == [1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 100), min_size=1, max_size=6))
def test_pieces_lie_one_behind_the_other(counts: list[int]) -> None:
    pieces: list[Identity] = [
        ("s", TensorInfo(str(count), (count,), DType.FLOAT64), Part.whole((count,))) for count in counts
    ]
    offsets, nbytes = places(pieces)
    ends = [offset + 8 * count for offset, count in zip(offsets, counts, strict=True)]
    assert all(end <= begin for end, begin in zip(ends, [*offsets[1:], nbytes], strict=True))
    assert all(offset % 64 == 0 for offset in offsets)


def test_ranks_with_the_same_part_of_a_model_need_no_copies_of_each_other() -> None:
    same = twins([0, 0, 1, 1])
    assert same == [(1,), (0,), (3,), (2,)]
    own = [{rank} for rank in range(4)]
    for lost in range(4):
        assert lost_origins([held for rank, held in enumerate(own) if rank != lost], same) == []
    assert lost_origins(own[:2], same) == [2, 3]
    assert twins([0, 0, 1, 1], leaving=[1, 2]) == [(), (0,), (3,), ()]
    assert twins([None, None]) == [(), ()]


@pytest.mark.parametrize("hosts", [[0, 0, 0, 0], [0, 0, 1, 1]])
def test_copies_of_a_divided_model_are_on_another_replica(hosts: list[int]) -> None:
    replicas = [0, 1, 0, 1]  # pipeline=2
    keepers = guards(hosts, replicas=replicas)
    kept = held(keepers, range(4))
    for lost in (0, 1):
        there = [kept[rank] for rank in range(4) if replicas[rank] != lost]
        assert lost_origins(there, [()] * 4) == []
    for host in set(hosts) if len(set(hosts)) > 1 else ():
        assert lost_origins([kept[rank] for rank in range(4) if hosts[rank] != host], [()] * 4) == []
    assert guards([0, 0], replicas=[0, 0]) == [1, 0]
