"""Parts of a block of causal attention cover what a mask leaves, each score once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidist_context_parallel.layout.blocks import Indices, causal_parts, row_tiles, tiles
from unidist_context_parallel.layout.sequence import zigzag


def scores(queries: Indices, keys: Indices) -> np.ndarray:
    """Return how often each score is computed."""
    found = np.zeros((len(queries), len(keys)), int)
    for part in causal_parts(queries, keys):
        block = found[part.rows, part.columns]
        if part.kind == "full":
            block += 1
        elif part.kind == "causal":
            assert block.shape[0] == block.shape[1]
            block += np.tri(*block.shape, dtype=int)
        else:
            block += keys[None, part.columns] <= queries[part.rows, None]
    return found


positions = st.lists(st.integers(0, 30), unique=True).map(lambda each: np.array(sorted(each), np.int64))


@given(positions, positions)
def test_each_visible_score_is_computed_once(queries: Indices, keys: Indices) -> None:
    assert (scores(queries, keys) == (keys[None] <= queries[:, None])).all()


@given(st.integers(0, 40), st.integers(1, 5))
def test_divided_sequences_and_whole_keys(size: int, ranks: int) -> None:
    layout = zigzag(size, ranks)
    for rank in range(ranks):
        queries = layout.positions(rank)
        for keys in [np.arange(size), *(layout.positions(other) for other in range(ranks))]:
            assert (scores(queries, keys) == (keys[None] <= queries[:, None])).all()
            assert all(part.kind != "mixed" for part in causal_parts(queries, keys))


@pytest.mark.parametrize("rank", range(4))
def test_a_block_of_a_zig_zag_division_is_one_part_and_ranks_compute_as_much(rank: int) -> None:
    layout = zigzag(64, 4)
    kinds = []
    for other in range(4):
        (part,) = causal_parts(layout.positions(rank), layout.positions(other))
        kinds.append((part.kind, part.rows.stop - part.rows.start, part.columns.stop - part.columns.start))
    assert kinds[rank] == ("causal", 16, 16)
    assert kinds[:rank] == [("full", 16, 8)] * rank
    assert kinds[rank + 1 :] == [("full", 8, 16)] * (3 - rank)


@given(positions, positions, st.booleans(), st.none() | st.integers(1, 9), st.integers(1, 9))
def test_tiles_cover_what_is_seen_once(
    queries: Indices, keys: Indices, causal: bool, window: int | None, limit: int
) -> None:
    seen = (keys[None] <= queries[:, None]) | (not causal)
    if window is not None:
        seen &= abs(keys[None] - queries[:, None]) < window
    found = np.zeros(seen.shape, int)
    rows = row_tiles(queries, limit)
    assert [index for each in rows for index in range(each.start, each.stop)] == list(range(len(queries)))
    for each in rows:
        for part in tiles(queries[each], keys, causal=causal, window=window, limit=limit):
            assert part.columns.stop - part.columns.start <= limit
            block, visible = found[each][part.rows, part.columns], seen[each][part.rows, part.columns]
            assert part.kind == "mixed" or visible.all()
            block += visible
    assert (found == seen).all()


@given(st.integers(1, 6), st.integers(0, 40))
def test_every_rank_has_tokens_of_a_sequence_of_two_chunks_for_each(ranks: int, more: int) -> None:
    assert min(zigzag(2 * ranks + more, ranks).counts) > 0
