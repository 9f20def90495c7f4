"""Cuts: the division of a parameter's dim over the ranks of the axis `tensor`. Pure arithmetic, for every framework.

A dim is a row of *blocks* (one, or the three of a fused query-key-value matrix), and each block is cut over all ranks,
in multiples of a unit (the width of a head). Sizes need not divide: then the first ranks have one unit more.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from unidist.checkpoint.format.parts import Box
from unidist.errors import ConfigurationError

AXIS = "tensor"
"""The mesh axis."""

Range = tuple[int, int]
"""`(start, stop)`."""


def split_counts(total: int, size: int, *, unit: int = 1, what: str = "elements") -> tuple[int, ...]:
    """Divide `total` elements over `size` ranks: returns multiples of `unit`, the first ones larger.

    Args:
        total: a multiple of `unit`.
        size: number of ranks.
        unit: stays together: the width of an attention head.
        what: names the units in messages ("heads of blocks.0").

    Raises:
        ConfigurationError: `unit` does not divide `total`, or there are more ranks than units.
    """
    if unit < 1 or total % unit:
        raise ConfigurationError(f"{what}: {total} elements do not divide into pieces of {unit}")
    units = total // unit
    if units < size:
        raise ConfigurationError(
            f"tensor={size} cannot cut {what}: there are only {units}, and each rank needs one. Use tensor={units} or "
            'less, or leave the layer whole (the role "replicate")'
        )
    each, more = divmod(units, size)
    return tuple((each + (rank < more)) * unit for rank in range(size))


@dataclass(frozen=True)
class Cut:
    """A dim that is divided over ranks.

    Args:
        dim: of the parameter.
        blocks: for each block, in order, the elements of every rank. Together they are the whole dim.
    """

    dim: int
    blocks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls, dim: int, totals: Sequence[int], size: int, *, units: Sequence[int] | None = None, what: str = "elements"
    ) -> Cut:
        """Return the cut of a dim.

        Args:
            dim: which one.
            totals: elements of each block; one block for an ordinary dim.
            size: number of ranks.
            units: what stays together in each block; default: single elements.
            what: see `split_counts`.

        Raises:
            ConfigurationError: see `split_counts`.
        """
        units = units or [1] * len(totals)
        return cls(
            dim,
            tuple(split_counts(total, size, unit=unit, what=what) for total, unit in zip(totals, units, strict=True)),
        )

    def along(self, dim: int) -> Cut:
        """Return the same division of another dim of this size (a bias's, the input of the next layer)."""
        return Cut(dim, self.blocks)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.blocks[0])

    @property
    def total(self) -> int:
        """Elements of the whole dim."""
        return sum(map(sum, self.blocks))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Elements of the dim on each rank."""
        return tuple(map(sum, zip(*self.blocks, strict=True)))

    def ranges(self, rank: int) -> tuple[Range, ...]:
        """Return a rank's ranges of the whole dim, in rising order; adjacent ranges are merged."""
        found: list[Range] = []
        begin = 0
        for counts in self.blocks:
            start = begin + sum(counts[:rank])
            stop = start + counts[rank]
            if found and found[-1][1] == start:
                found[-1] = (found[-1][0], stop)
            else:
                found.append((start, stop))
            begin += sum(counts)
        return tuple(found)

    def indices(self, rank: int) -> list[int]:
        """Return a rank's indices of the whole dim, in rising order."""
        return list(itertools.chain.from_iterable(range(*each) for each in self.ranges(rank)))

    def boxes(self, shape: Sequence[int], rank: int) -> tuple[Box, ...]:
        """Return a rank's part of a parameter of this (whole) shape: boxes side by side along the dim.

        Raises:
            ConfigurationError: the dim has another size than the one that was cut.
        """
        dim = self.dim % len(shape) if shape else 0
        if not shape or shape[dim] != self.total:
            raise ConfigurationError(f"dim {self.dim} of a parameter of shape {list(shape)} does not have {self.total}")
        whole: list[Range] = [(0, size) for size in shape]
        return tuple((*whole[:dim], each, *whole[dim + 1 :]) for each in self.ranges(rank))

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the whole parameter of which a rank has a part of this shape."""
        dim = self.dim % len(shape)
        return (*shape[:dim], self.total, *shape[dim + 1 :])


def even(dim: int, total: int, size: int, *, unit: int = 1, what: str = "elements") -> Cut:
    """Return the cut of a dim of one block."""
    return Cut.of(dim, [total], size, units=[unit], what=what)


@dataclass(frozen=True)
class Heads:
    """The heads of an attention, divided over ranks: query heads stay with the key and value heads that they use.

    Args:
        heads: of the queries.
        kv_heads: of keys and values; divides `heads`. Equal to it unless queries share them (grouped-query attention).
        width: of one head.
        size: number of ranks.
        what: the attention's path, for messages.

    Raises:
        ConfigurationError: heads that do not divide, or fewer key-value heads than ranks.
    """

    heads: int
    kv_heads: int
    width: int
    size: int
    what: str = "attention"

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ConfigurationError(
                f"{self.what}: {self.heads} query heads do not share {self.kv_heads} key-value heads evenly"
            )
        split_counts(self.kv_heads, self.size, what=f"the heads of {self.what}")

    @property
    def group(self) -> int:
        """Query heads for each key-value head."""
        return self.heads // self.kv_heads

    def local_kv_heads(self, rank: int) -> int:
        """Return the key-value heads of a rank."""
        return split_counts(self.kv_heads, self.size)[rank]

    def local_heads(self, rank: int) -> int:
        """Return the query heads of a rank."""
        return self.local_kv_heads(rank) * self.group

    def first_head(self, rank: int) -> int:
        """Return the number of the first query head of a rank."""
        return sum(split_counts(self.kv_heads, self.size)[:rank]) * self.group

    def queries(self, dim: int) -> Cut:
        """Return the cut of a dim with the query heads in a row, `(heads * width)` elements."""
        return even(dim, self.heads * self.width, self.size, unit=self.group * self.width, what=self._heads)

    def keys(self, dim: int) -> Cut:
        """Return the cut of a dim with the key (or value) heads in a row."""
        return even(dim, self.kv_heads * self.width, self.size, unit=self.width, what=self._heads)

    def fused(self, dim: int) -> Cut:
        """Return the cut of a dim with all queries, then all keys, then all values."""
        queries, keys = self.queries(dim).blocks, self.keys(dim).blocks
        return Cut(dim, queries + keys + keys)

    @property
    def _heads(self) -> str:
        return f"the heads of {self.what}"
