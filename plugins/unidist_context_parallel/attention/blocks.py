"""Attention of one rank's queries to the keys and values of one rank after the other, with a running softmax.

Dao et al. 2022 (https://arxiv.org/abs/2205.14135), section 3.1: of each row of scores the largest so far, the sum of
their exponentials, and the sum of the values weighted by these. Blocks are computed in tiles, so that few scores are in
memory at once.

Shapes: B samples, K heads of keys, G heads of queries for each of them, T tokens (of a rank or a tile), W width.
Queries are `(B, K, G, T, W)`, keys and values `(B, K, 1, T, W)`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from unidist_context_parallel.attention.arrays import Array, ArrayFunctions
from unidist_context_parallel.layout.blocks import BlockPart, row_tiles, tiles
from unidist_context_parallel.layout.sequence import SequenceLayout

TILE = 1024
"""Rows and columns of scores that are computed at once: larger matrices are not faster on CPUs."""


@dataclass(frozen=True)
class Mask:
    """Which keys the queries see, besides what positions say; arrays of bool.

    A query that sees no key gets the mean of all values, as in `keras.layers.MultiHeadAttention` and
    `jax.nn.dot_product_attention`, where all its scores are the same large negative number.

    Args:
        queries: None, or `(B, 1, 1, T, 1)`: this rank's queries that see keys at all.
        keys: None, or `(B, 1, 1, 1, all keys)`: keys that are seen at all.
        pairs: None, or broadcast to `(B, K, G, T, all keys)`, with as many rows as this rank has queries, or 1.
    """

    queries: Array | None = None
    keys: Array | None = None
    pairs: Array | None = None


@dataclass(frozen=True)
class _Rows:
    """The running softmax of a tile of rows: `(B, K, G, rows, 1)` and `(B, K, G, rows, W)`."""

    largest: Array
    total: Array
    output: Array


@dataclass(frozen=True)
class Running:
    """The running sums so far. Immutable.

    Args:
        rows: for each tile of rows.
        values: the sum of all values `(B, K, 1, 1, W)`, or None if every query sees a key.
    """

    rows: tuple[_Rows | None, ...]
    values: Array | None

    @property
    def latest(self) -> list[Array]:
        """What is there when all of it has been computed."""
        return [each.output for each in self.rows if each is not None]


@dataclass(frozen=True)
class BlockAttention:
    """One attention, as one rank computes it.

    Args:
        functions: of the framework.
        layout: of queries and keys, on all ranks.
        rank: this one.
        causal: a query sees keys up to its own position.
        window: if given, it sees keys at a smaller distance alone.
        mask: what else hides keys; None: nothing.
        dropped: None, or `dropped(weights, number)` returns factors for weights, 0 or 1/(1 - rate), the same ones for
            the same number.
        tile: rows and columns that are computed at once.
    """

    functions: ArrayFunctions
    layout: SequenceLayout
    rank: int
    causal: bool = False
    window: int | None = None
    mask: Mask | None = None
    dropped: Callable[[Array, int], Array] | None = None
    tile: int = TILE

    # Forward

    def start(self) -> Running:
        """Return the state before the first block."""
        return Running((None,) * len(self._row_tiles), None)

    def add(self, running: Running, q: Array, k: Array, v: Array, owner: int) -> Running:
        """Return the state after attending to the keys and values of a rank, too.

        Args:
            running: before.
            q: this rank's queries, times the scale, in the type that is computed in.
            k: keys of the owner.
            v: values of the owner.
            owner: a rank. Each is given once, this one first: its own keys are what a query sees in any case.
        """
        f = self.functions
        rows = list(running.rows)
        latest = running.latest
        for index, part, number in self._tiles(owner):
            scores = self._scores(q, f.after(k, *latest[-1:]), index, part, owner)
            before, own = rows[index], self._part(scores, v, part, number)
            assert before is not None or part.rows == slice(0, _size(self._row_tiles[index])), "its own keys come first"
            merged = rows[index] = own if before is None else self._merged(before, own, part.rows)
            latest = [merged.output]
        values = running.values
        if self.mask is not None:
            own = f.sum(f.cast(v, q), 3)
            values = own if values is None else values + own
        return Running(tuple(rows), values)

    def finish(self, running: Running) -> tuple[Array, Array]:
        """Return the output `(B, K, G, T, W)`, and the log-sum-exp `(B, K, G, T, 1)`, inf where no key is seen."""
        f = self.functions
        outputs, sums = [], []
        for rows in running.rows:
            assert rows is not None, "the first block has keys for all rows"
            if running.values is None:
                outputs.append(rows.output / rows.total)
                sums.append(rows.largest + f.log(rows.total))
                continue
            sees = rows.total > 0
            total = f.where(sees, rows.total, 1.0)
            outputs.append(f.where(sees, rows.output / total, running.values / self.layout.size))
            sums.append(f.where(sees, f.where(sees, rows.largest, 0.0) + f.log(total), np.inf))
        return f.concatenate(outputs, 3), f.concatenate(sums, 3)

    def _part(self, scores: Array, v: Array, part: BlockPart, number: int) -> _Rows:
        f = self.functions
        largest = f.max(scores, -1)
        weights = f.exp(scores - self._finite(largest))
        total = f.sum(weights, -1)
        if self.dropped is not None:
            weights = weights * self.dropped(weights, number)
        return _Rows(largest, total, f.matmul(weights, f.cast(v[:, :, :, part.columns], weights)))

    def _merged(self, rows: _Rows, part: _Rows, at: slice) -> _Rows:
        """Return rows with a part added to those at `at`."""
        f = self.functions
        before = _Rows(*(each[:, :, :, at] for each in (rows.largest, rows.total, rows.output)))
        largest = f.maximum(before.largest, part.largest)
        base = self._finite(largest)
        old, new = f.exp(before.largest - base), f.exp(part.largest - base)
        changed = _Rows(largest, before.total * old + part.total * new, before.output * old + part.output * new)
        return _Rows(
            *(
                self._spliced(whole, own, at)
                for whole, own in (
                    (rows.largest, changed.largest),
                    (rows.total, changed.total),
                    (rows.output, changed.output),
                )
            )
        )

    def _spliced(self, whole: Array, own: Array, at: slice) -> Array:
        """Return `whole` with its rows at `at` replaced by `own`."""
        if at == slice(0, whole.shape[3]):
            return own
        return self.functions.concatenate([whole[:, :, :, : at.start], own, whole[:, :, :, at.stop :]], 3)

    # Backward

    def backward(
        self, gradient: Array, inner: Array, q: Array, k: Array, v: Array, sums: Array, owner: int, latest: Array
    ) -> tuple[Array, Array, Array]:
        """Return the gradients of the queries, of the keys and of the values that come from a rank's block.

        Args:
            gradient: of the output, in the type of q.
            inner: its products with the output, summed over the width: `(B, K, G, T, 1)`.
            q: as in forward.
            k: of the block.
            v: of the block.
            sums: the log-sum-exp of all blocks, see `finish`.
            owner: the rank whose block it is.
            latest: what is to be there before anything is computed.
        """
        f = self.functions
        of_rows: list[Array | None] = [None for _ in self._row_tiles]
        of_k, of_v = _Columns(f, k, q), _Columns(f, v, q)
        for index, part, number in self._tiles(owner):
            tile = self._row_tiles[index]
            rows = slice(tile.start + part.rows.start, tile.start + part.rows.stop)
            scores = self._scores(q, f.after(k, latest), index, part, owner)
            weights = f.exp(scores - sums[:, :, :, rows])
            own = gradient[:, :, :, rows]
            of_weights = f.matmul(own, f.transposed(f.cast(v[:, :, :, part.columns], q)))
            used = weights
            if self.dropped is not None:
                factors = self.dropped(weights, number)
                used, of_weights = weights * factors, of_weights * factors
            of_scores = weights * (of_weights - inner[:, :, :, rows])
            of_q = f.matmul(of_scores, f.cast(k[:, :, :, part.columns], q))
            before = of_rows[index]
            if before is None and part.rows != slice(0, _size(tile)):
                before = f.zeros_like(q[:, :, :, tile])
            if before is not None:
                of_q = self._spliced(before, before[:, :, :, part.rows] + of_q, part.rows)
            of_rows[index] = latest = of_q
            of_k.add(part.columns, f.sum(f.matmul(f.transposed(of_scores), q[:, :, :, rows]), 2))
            of_v.add(part.columns, f.sum(f.matmul(f.transposed(used), own), 2))
        of_values = of_v.whole()
        if self.mask is not None:  # rows without a key have the mean of all values
            blind = f.where(sums == np.inf, gradient, 0.0)
            of_values = of_values + f.sum(f.sum(blind, 3), 2) / self.layout.size
        of_q = [
            f.zeros_like(q[:, :, :, tile]) if own is None else own
            for tile, own in zip(self._row_tiles, of_rows, strict=True)
        ]
        return f.concatenate(of_q, 3), of_k.whole(), of_values

    # Scores

    def _scores(self, q: Array, k: Array, index: int, part: BlockPart, owner: int) -> Array:
        """Return the scores of a part, -inf where a query does not see a key."""
        f = self.functions
        tile = self._row_tiles[index]
        rows = slice(tile.start + part.rows.start, tile.start + part.rows.stop)
        own = q[:, :, :, rows]
        scores = f.matmul(own, f.transposed(f.cast(k[:, :, :, part.columns], q)))
        for seen in self._seen(rows, part, owner):
            scores = f.where(seen, scores, -np.inf)
        return scores

    def _seen(self, rows: slice, part: BlockPart, owner: int) -> list[Array]:
        f, keys = self.functions, self.layout.positions(owner)[part.columns]
        found = []
        if part.kind == "mixed":
            queries = f.constant(self.layout.positions(self.rank)[rows][:, None])
            columns = f.constant(keys[None, :])
            if self.causal:
                found.append(columns <= queries)
            if self.window is not None:
                found += [columns - queries < self.window, queries - columns < self.window]
        if self.mask is None:
            return found
        if self.mask.queries is not None:
            found.append(self.mask.queries[:, :, :, rows])
        if self.mask.keys is not None:
            found.append(f.take(self.mask.keys, keys, 4))
        if self.mask.pairs is not None:
            pairs = self.mask.pairs
            pairs = pairs if pairs.shape[3] == 1 else pairs[:, :, :, rows]
            found.append(pairs if pairs.shape[4] == 1 else f.take(pairs, keys, 4))
        return found

    def _finite(self, largest: Array) -> Array:
        return self.functions.where(largest > -np.inf, largest, 0.0)

    @property
    def _row_tiles(self) -> list[slice]:
        positions = self.layout.positions(self.rank)
        return self.layout.derived(("row tiles", self.rank, self.tile), lambda: row_tiles(positions, self.tile))

    def _tiles(self, owner: int) -> Sequence[tuple[int, BlockPart, int]]:
        """Return what is computed of a block: the number of the tile of rows, the part of it, and a number for it."""

        def make() -> list[tuple[int, BlockPart, int]]:
            queries, keys = self.layout.positions(self.rank), self.layout.positions(owner)
            found = [
                (index, part)
                for index, rows in enumerate(self._row_tiles)
                for part in tiles(queries[rows], keys, causal=self.causal, window=self.window, limit=self.tile)
            ]
            return [(index, part, owner * 2**16 + number) for number, (index, part) in enumerate(found)]

        key = ("tiles", self.rank, owner, self.causal, self.window, self.tile)
        return self.layout.derived(key, make)


def _size(rows: slice) -> int:
    return int(rows.stop - rows.start)


class _Columns:
    """Sums over rows for the columns of a block."""

    def __init__(self, functions: ArrayFunctions, like: Array, type_of: Array) -> None:
        self._functions, self._like, self._type_of = functions, like, type_of
        self._sums: dict[tuple[int, int], Array] = {}

    def add(self, columns: slice, part: Array) -> None:
        key = columns.start, columns.stop
        self._sums[key] = self._sums[key] + part if key in self._sums else part

    def whole(self) -> Array:
        """Return all columns; those that nothing was added to are zero."""
        f = self._functions
        bounds = sorted({0, self._like.shape[3], *(bound for key in self._sums for bound in key)})
        found = []
        for start, stop in itertools.pairwise(bounds):
            total = None
            for (first, end), part in self._sums.items():
                if first <= start and stop <= end:
                    own = part[:, :, :, start - first : stop - first]
                    total = own if total is None else total + own
            if total is None:
                total = f.cast(f.zeros_like(self._like[:, :, :, start:stop]), self._type_of)
            found.append(total)
        return f.concatenate(found, 3)
