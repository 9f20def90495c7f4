"""Who keeps copies, what is left after losses, and who gives what: for any number of hosts, ranks and cuts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unidist.buffer import DType
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import TensorInfo
from unidist.checkpoint.format.writing import Identity
from unidist.elastic.peer.transfers import Wanted, guards, lost_origins, missing, places, transfers, twins

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


def cut(count: int, at: Sequence[int]) -> list[tuple[int, int]]:
    bounds = sorted({0, count, *(each for each in at if each < count)})
    return list(itertools.pairwise(bounds)) if count else [(0, 0)]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.lists(st.integers(0, 40), max_size=4),
    st.lists(st.integers(0, 40), max_size=4),
    st.data(),
)
def test_every_element_is_given_once_by_somebody_who_has_it(
    counts: list[int], before: list[int], after: list[int], data: st.DataObject
) -> None:
    infos = [TensorInfo(f"t{number}", (count,), DType.FLOAT32) for number, count in enumerate(counts)]
    holdings: dict[int, list[Identity]] = {origin: [] for origin in range(len(before) + 1)}
    wants: list[list[Wanted]] = [[] for _ in range(len(after) + 1)]
    for info in infos:
        for origin, (start, stop) in enumerate(cut(info.count, before)):
            holdings[origin].append(("s", info, Part.flat(info.shape, start, stop)))
        for rank, (start, stop) in enumerate(cut(info.count, after)):
            wants[rank].append(("s", info.name, Part.flat(info.shape, start, stop)))
    ranks = st.lists(st.integers(0, len(wants) - 1), min_size=1, max_size=2, unique=True)
    holders = {origin: data.draw(ranks) for origin in holdings}
    chosen = transfers(holdings, holders, wants)
    for each in chosen:
        assert each.giver in holders[each.origin]
        assert each.giver == each.taker or each.taker not in holders[each.origin]
    for rank, wanted in enumerate(wants):
        mine = [each for each in chosen if each.taker == rank]
        assert missing(wanted, mine) == []
        for number, (_, name, part) in enumerate(wanted):
            got = []
            for each in (each for each in mine if each.wanted == number):
                _, info, piece = holdings[each.origin][each.piece]
                assert info.name == name
                assert piece.start + each.run.source == part.start + each.run.target
                got += range(each.run.target, each.run.target + each.run.count)
            assert sorted(got) == list(range(part.count))


def test_what_several_hold_in_part_is_not_given_twice() -> None:
    info = TensorInfo("t", (10,), DType.FLOAT64)
    holdings: dict[int, list[Identity]] = {
        0: [("s", info, Part.flat((10,), 0, 7))],
        1: [("s", info, Part.flat((10,), 4, 10))],
    }
    chosen = transfers(holdings, {0: [0], 1: [1]}, [[], [("s", "t", Part.flat((10,), 2, 10))]])
    assert [(each.giver, each.run.target, each.run.count) for each in chosen] == [(1, 2, 6), (0, 0, 2)]


def test_what_nobody_has_is_missing() -> None:
    info = TensorInfo("t", (10,), DType.FLOAT64)
    wanted: list[Wanted] = [("s", "t", Part.whole((10,)))]
    chosen = transfers({0: [("s", info, Part.flat((10,), 0, 7))]}, {0: [0]}, [wanted])
    assert missing(wanted, chosen) == wanted


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
