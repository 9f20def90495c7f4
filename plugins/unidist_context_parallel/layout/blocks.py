"""Which parts of a block of attention scores a causal mask leaves, by positions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

__all__ = ["BlockPart", "causal_parts", "row_tiles", "tiles"]


@dataclass(frozen=True)
class BlockPart:
    """A rectangle of a block's scores.

    Args:
        rows: range of queries in the block.
        columns: range of keys in the block.
        kind: "full": every query sees every key. "causal": query i sees keys 0 to i. "mixed": as positions say.
    """

    rows: slice
    columns: slice
    kind: Literal["full", "causal", "mixed"]


def causal_parts(queries: Indices, keys: Indices) -> list[BlockPart]:
    """Return what causal attention computes of a block, in disjoint parts: a query sees keys up to its own position.

    With the zig-zag division that is one part: the causal half of a rank's own block, all of the first half of the keys
    of an earlier rank, or the second half of the queries with all keys of a later one.

    Args:
        queries: positions, ascending.
        keys: positions, ascending.
    """
    if not len(queries) or not len(keys):
        return []
    first = int(np.searchsorted(queries, keys[0]))  # queries before it see no key
    end = int(np.searchsorted(keys, queries[-1], side="right"))  # keys from here on are seen by no query
    rows, columns = slice(first, len(queries)), slice(0, end)
    if first == len(queries) or not end:
        return []
    q, k = queries[rows], keys[columns]
    if k[-1] <= q[0]:
        return [BlockPart(rows, columns, "full")]
    if len(q) == len(k) and (q == k).all():
        return [BlockPart(rows, columns, "causal")]
    # Runs of consecutive positions: all but those on the diagonal are full, or seen by nobody.
    query_runs, key_runs = _runs(q), _runs(k)
    if len(query_runs) * len(key_runs) > _MAX_PIECES:
        return [BlockPart(rows, columns, "mixed")]
    parts: list[BlockPart] = []
    for start, stop in query_runs:
        for left, right in key_runs:
            parts += _of_runs(q[start:stop], k[left:right], first + start, left)
    return parts


_MAX_PIECES = 16


def row_tiles(positions: Indices, limit: int) -> list[slice]:
    """Return ranges of consecutive positions, of `limit` rows at most."""
    return [
        slice(start, min(start + limit, end))
        for first, end in _runs(positions)
        for start in range(first, end, limit)
        if len(positions)
    ]


def tiles(queries: Indices, keys: Indices, *, causal: bool, window: int | None = None, limit: int) -> list[BlockPart]:
    """Return what attention computes of a block, in disjoint parts of `limit` columns at most: "full" or "mixed" ones.

    For arithmetic without a fused kernel, which has the scores of a part in memory.

    Args:
        queries: positions, ascending.
        keys: positions, ascending.
        causal: a query sees keys up to its own position.
        window: if given, a query sees keys at a smaller distance than this alone.
        limit: columns of a part.
    """
    whole = [BlockPart(slice(0, len(queries)), slice(0, len(keys)), "full")] if len(queries) and len(keys) else []
    found: list[BlockPart] = []
    for part in causal_parts(queries, keys) if causal else whole:
        q = queries[part.rows]
        for start in range(part.columns.start, part.columns.stop, limit):
            columns = slice(start, min(start + limit, part.columns.stop))
            k = keys[columns]
            farthest = max(q[-1] - k[0], k[-1] - q[0])
            nearest = max(q[0] - k[-1], k[0] - q[-1], 0)
            if (causal and k[0] > q[-1]) or (window is not None and nearest >= window):
                continue
            whole_tile = (not causal or k[-1] <= q[0]) and (window is None or farthest < window)
            found.append(BlockPart(part.rows, columns, "full" if whole_tile else "mixed"))
    return found


def _of_runs(queries: Indices, keys: Indices, row: int, column: int) -> list[BlockPart]:
    """Return the parts of two runs, which begin at this row and column of the block."""
    first, end = max(int(queries[0]), int(keys[0])), int(queries[-1]) + 1
    last = min(int(keys[-1]) + 1, end)
    if first >= end:
        return []
    begin, stop = row + first - int(queries[0]), row + end - int(queries[0])
    before, after = column + max(0, first - int(keys[0])), column + last - int(keys[0])
    parts = []
    if before > column:
        parts.append(BlockPart(slice(begin, stop), slice(column, min(before, after)), "full"))
    if last > first:
        middle = begin + last - first
        parts.append(BlockPart(slice(begin, middle), slice(before, after), "causal"))
        if middle < stop:
            parts.append(BlockPart(slice(middle, stop), slice(before, after), "full"))
    return parts


def _runs(positions: Indices) -> list[tuple[int, int]]:
    breaks = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    return list(itertools.pairwise(breaks))
