"""Division of one dim of a tensor over ranks by rows, and how it carries over when the tensor is reshaped.

A row is on exactly one rank, and a rank's rows are in ascending order. So a layout is one array: the owner of each row.
Every rank knows the whole layout of a tensor, and what another rank has of it.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Owners = npt.NDArray[np.int16]

T = TypeVar("T")

AXIS = "context"

__all__ = ["AXIS", "SequenceLayout", "joined", "layout_of", "ring_owners", "zigzag"]


class SequenceLayout:
    """The owner of each row of a dim. Layouts are interned: equal ones are the same object. Made by `layout_of`.

    Attributes:
        owner: `(size,)`, the rank on the axis that has this row.
        num_ranks: ranks on the axis.
        size: rows on all ranks together.
        counts: rows on each rank.
    """

    def __init__(self, owner: Owners, num_ranks: int) -> None:
        self.owner = owner
        self.num_ranks = num_ranks
        self.size = len(owner)
        self.counts = [int(count) for count in np.bincount(owner, minlength=num_ranks)]
        self._derived: dict[Hashable, Any] = {}

    def __reduce__(self) -> Any:
        return layout_of, (self.owner, self.num_ranks)

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`, computed once for each key: models ask for the same in every step."""
        if key not in self._derived:
            self._derived[key] = make()
        found: T = self._derived[key]
        return found

    def positions(self, rank: int) -> Indices:
        """Return the rows of a rank, ascending."""
        return self.derived(("positions", rank), lambda: np.flatnonzero(self.owner == rank))

    def runs(self, rank: int) -> list[tuple[int, int]]:
        """Return the rows of a rank as ranges (first, end)."""
        return self.derived(("runs", rank), lambda: _runs(self.positions(rank)))

    def local_indices(self) -> Indices:
        """Return for each row its number among the rows of its owner."""

        def make() -> Indices:
            found = np.empty(self.size, np.int64)
            for rank in range(self.num_ranks):
                found[self.positions(rank)] = np.arange(self.counts[rank])
            return found

        return self.derived("local", make)

    def gathered_order(self) -> Indices:
        """Return the place of each row in a concatenation of all ranks' rows."""

        def make() -> Indices:
            starts = np.concatenate([[0], np.cumsum(self.counts)[:-1]])
            found: Indices = starts[self.owner] + self.local_indices()
            return found

        return self.derived("order", make)

    # What becomes of a layout

    def sliced(self, start: int, stop: int, step: int) -> SequenceLayout:
        """Return the layout of `rows[start:stop:step]`; arguments as of `slice.indices`, the step positive."""
        return self.derived(
            ("slice", start, stop, step), lambda: layout_of(self.owner[start:stop:step], self.num_ranks)
        )

    def local_slice(self, rank: int, start: int, stop: int, step: int) -> slice | Indices:
        """Return which of a rank's rows are in `rows[start:stop:step]`: a range, or their numbers."""

        def make() -> slice | Indices:
            positions = self.positions(rank)
            first, end = np.searchsorted(positions, (start, max(start, stop)))
            if step == 1:
                return slice(int(first), int(end))
            numbers: Indices = first + np.flatnonzero((positions[first:end] - start) % step == 0)
            return numbers

        return self.derived(("local slice", rank, start, stop, step), make)

    def taken(self, indices: Indices) -> SequenceLayout:
        """Return the layout of `rows[indices]`: a row stays on its rank."""
        return layout_of(self.owner[indices], self.num_ranks)

    def locally_taken(self, rank: int, indices: Indices) -> Indices:
        """Return which of a rank's rows are in `rows[indices]`, by their number on the rank, in this order."""
        mine = indices[self.owner[indices] == rank]
        found: Indices = self.local_indices()[mine]
        return found

    def merged(self, outer: int, inner: int) -> SequenceLayout:
        """Return the layout of the dim made of `(outer, rows, inner)`."""
        if outer == inner == 1:
            return self
        return self.derived(
            ("merge", outer, inner),
            lambda: layout_of(np.tile(np.repeat(self.owner, inner), outer), self.num_ranks),
        )

    def split(self, shape: Sequence[int]) -> tuple[int, SequenceLayout] | None:
        """Return which dim of `shape`, into which the dim is split, is divided, and its layout.

        None if the rows of a rank are no such dim.
        """
        return self.derived(("split", *shape), lambda: _split(self, tuple(shape)))


def layout_of(owner: Any, num_ranks: int) -> SequenceLayout:
    """Return the layout with these owners, `(size,)` of whole numbers below `num_ranks`."""
    owners: Owners = np.ascontiguousarray(owner, dtype=np.int16)
    key = (num_ranks, owners.tobytes())
    with _lock:  # equal layouts are one object, whichever thread asks
        found = _layouts.get(key)
        if found is None:
            found = _layouts[key] = SequenceLayout(owners, num_ranks)
        return found


_lock = threading.Lock()
_layouts: weakref.WeakValueDictionary[tuple[int, bytes], SequenceLayout] = weakref.WeakValueDictionary()


@lru_cache(maxsize=32)
def zigzag(size: int, num_ranks: int) -> SequenceLayout:
    """Return the division with which every rank has as much to do in causal attention.

    Of 2N chunks, as equal as possible, rank r has r and 2N-1-r: one where few tokens come before, and one where many do
    (Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2).

    Args:
        size: tokens; any number.
        num_ranks: N.
    """
    chunks = 2 * num_ranks
    ends = [size * (number + 1) // chunks for number in range(chunks)]
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    owners = [min(number, chunks - 1 - number) for number in range(chunks)]
    return layout_of(np.repeat(owners, sizes), num_ranks)


def ring_owners(rank: int, num_ranks: int) -> list[int]:
    """Return whose rows a rank has in each step of a ring in which all send theirs to the next rank: first its own."""
    return [(rank - step) % num_ranks for step in range(num_ranks)]


def joined(layouts: Sequence[SequenceLayout]) -> SequenceLayout:
    """Return the layout of a concatenation."""
    key = ("join", *(id(each) for each in layouts[1:]))
    # The others are kept with the result, so that no other layout gets their identity.
    made = layouts[0].derived(
        key,
        lambda: (layout_of(np.concatenate([each.owner for each in layouts]), layouts[0].num_ranks), tuple(layouts)),
    )
    return made[0]


def _runs(positions: Indices) -> list[tuple[int, int]]:
    if not len(positions):
        return []
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(positions, breaks)]


def _split(layout: SequenceLayout, shape: tuple[int, ...]) -> tuple[int, SequenceLayout] | None:
    owner = layout.owner.reshape(shape)
    found = None
    for dim, size in enumerate(shape):
        outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
        if not (outer * inner):
            continue
        line = owner.reshape(outer, size, inner)[0, :, 0]
        if (owner.reshape(outer, size, inner) == line[None, :, None]).all():
            found = dim, layout_of(line, layout.num_ranks)
            if size > 1:
                return found
    return found
