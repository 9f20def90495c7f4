"""Layouts of divided sequences, against whole arrays."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from unidist_context_parallel.layout.sequence import joined, layout_of, zigzag


@given(st.integers(0, 40), st.integers(1, 5))
def test_every_token_is_on_one_rank_and_ranks_have_as_many_and_as_much_to_do(size: int, ranks: int) -> None:
    layout = zigzag(size, ranks)
    rows = [layout.positions(rank).tolist() for rank in range(ranks)]
    assert sorted(itertools.chain(*rows)) == list(range(size))
    assert all(row == sorted(row) for row in rows)
    assert max(layout.counts) - min(layout.counts) <= 2
    work = [sum(position + 1 for position in row) for row in rows]
    assert max(work) - min(work) <= 3 * size + 2  # of size * size / (2 * ranks)


def test_the_first_rank_has_the_first_and_the_last_chunk() -> None:
    layout = zigzag(8, 2)
    assert layout.owner.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert layout.runs(0) == [(0, 2), (6, 8)]


def test_equal_layouts_are_one_object() -> None:
    layout = zigzag(8, 2)
    assert layout_of([0, 0, 1, 1, 1, 1, 0, 0], 2) is layout
    assert pickle.loads(pickle.dumps(layout)) is layout
    assert joined([layout.sliced(0, 4, 1), layout.sliced(4, 8, 1)]) is layout


@given(st.integers(1, 24), st.integers(1, 4), st.integers(-30, 30), st.integers(-30, 30), st.integers(1, 4))
def test_slices(size: int, ranks: int, first: int, last: int, step: int) -> None:
    layout = zigzag(size, ranks)
    start, stop, step = slice(first, last, step).indices(size)
    sliced = layout.sliced(start, stop, step)
    values = np.arange(size)
    for rank in range(ranks):
        own = values[layout.positions(rank)][layout.local_slice(rank, start, stop, step)]
        assert own.tolist() == values[start:stop:step][sliced.positions(rank)].tolist()


@given(st.integers(1, 12), st.integers(1, 4), st.lists(st.integers(0, 11), max_size=20))
def test_indices(size: int, ranks: int, chosen: list[int]) -> None:
    layout = zigzag(size, ranks)
    indices = np.array([each % size for each in chosen], np.int64)
    taken = layout.taken(indices)
    for rank in range(ranks):
        own = layout.positions(rank)[layout.locally_taken(rank, indices)]
        assert own.tolist() == indices[taken.positions(rank)].tolist()


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_a_dim_is_merged_with_its_neighbours_and_split_again(size: int, ranks: int, outer: int, inner: int) -> None:
    layout = zigzag(size, ranks)
    merged = layout.merged(outer, inner)
    values = np.arange(outer * size * inner)
    for rank in range(ranks):
        rows = values.reshape(outer, size, inner)[:, layout.positions(rank)]
        assert rows.reshape(-1).tolist() == merged.positions(rank).tolist()
    split = merged.split((outer, size, inner))
    assert split is not None
    if size > 1 and sum(count > 0 for count in layout.counts) > 1:
        assert split == (1, layout)


def test_a_split_that_mixes_the_ranks_of_a_row_is_none() -> None:
    assert zigzag(12, 2).split((4, 3)) == (0, layout_of([0, 1, 1, 0], 2))
    assert zigzag(12, 2).split((6, 2)) is None
    assert zigzag(12, 2).split((2, 6)) is None


def test_rows_find_their_place_in_what_is_gathered() -> None:
    layout = zigzag(10, 2)
    gathered = np.concatenate([layout.positions(0), layout.positions(1)])
    assert gathered[layout.gathered_order()].tolist() == list(range(10))
