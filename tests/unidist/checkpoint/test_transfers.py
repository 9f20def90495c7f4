"""Who gives what to whom: for any number of ranks and cuts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from unidist.buffer import DType
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import TensorInfo
from unidist.checkpoint.format.writing import Identity
from unidist.checkpoint.transfers import Wanted, missing, transfers


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
    wants: list[list[Wanted]] = [[] for _ in range(len(after) + 1)]
    ranks = st.lists(st.integers(0, len(wants) - 1), min_size=1, max_size=2, unique=True)
    holders: dict[Identity, list[int]] = {}
    for info in infos:
        for start, stop in cut(info.count, before):
            holders["s", info, Part.flat(info.shape, start, stop)] = data.draw(ranks)
        for rank, (start, stop) in enumerate(cut(info.count, after)):
            wants[rank].append(("s", info.name, Part.flat(info.shape, start, stop)))
    chosen = transfers(holders, wants)
    for each in chosen:
        assert each.giver in holders[each.piece]
        assert each.giver == each.taker or each.taker not in holders[each.piece]
        assert each.max_nbytes >= sum(run.count for run in each.runs()) * 4
    for rank, wanted in enumerate(wants):
        mine = [each for each in chosen if each.taker == rank]
        assert missing(wanted, mine) == []
        for want in wanted:
            got: list[int] = []
            for each in (each for each in mine if each.wanted == want):
                assert each.piece[1].name == want[1]
                for run in each.runs():
                    assert each.piece[2].start + run.source == want[2].start + run.target
                    got += range(run.target, run.target + run.count)
            assert sorted(got) == list(range(want[2].count))


def test_ranks_that_have_the_same_give_about_as_much() -> None:
    infos = [TensorInfo(f"t{number}", (10,), DType.FLOAT64) for number in range(6)]
    whole = Part.whole((10,))
    wanted: list[Wanted] = [("s", info.name, whole) for info in infos]
    chosen = transfers({("s", info, whole): [0, 1, 2] for info in infos}, [[], [], [], wanted])
    assert sorted(each.giver for each in chosen) == [0, 0, 1, 1, 2, 2]


def test_what_nobody_has_is_missing() -> None:
    info = TensorInfo("t", (10,), DType.FLOAT64)
    wanted: list[Wanted] = [("s", "t", Part.whole((10,)))]
    chosen = transfers({("s", info, Part.flat((10,), 0, 7)): [0]}, [wanted])
    assert missing(wanted, chosen) == wanted
