"""Which elements of a tensor: a box, and in the box's row-major order a flat range. Pure arithmetic.

A tensor that is split along a dim (tensor parallelism) is cut into boxes; one that is sharded in flat ranges (ZeRO)
into ranges of the whole box; and both together into ranges of a box. Of a tensor that has several blocks side by side,
each of which is split (queries, keys and values in one), a rank has several boxes side by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from unidist.errors import UsageError

Box = tuple[tuple[int, int], ...]
"""`(start, stop)` per dim."""


@dataclass(frozen=True, slots=True)
class Part:
    """A flat range of a box of a tensor, or of several boxes that lie side by side.

    Args:
        box: `(start, stop)` per dim, in indices of the whole tensor; `()` for a scalar.
        start: of the range, counted over the elements of the box in row-major order.
        stop: end of the range.
        more: further boxes, which differ from the first in one dim alone, the same for all, and rise in it without
            overlap. The row-major order is that of all of them put together along this dim.
    """

    box: Box
    start: int
    stop: int
    more: tuple[Box, ...] = ()

    def __post_init__(self) -> None:
        size = sum(map(box_size, self.boxes))
        wrong = any(not 0 <= low <= high for box in self.boxes for low, high in box)
        if wrong or not 0 <= self.start <= self.stop <= size:
            raise UsageError(f"range [{self.start}, {self.stop}) of the box {self.box} with {size} elements")
        if self.more and joint_dim(self.boxes) is None:
            raise UsageError(f"the boxes {self.boxes} do not lie side by side along one dim")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Part:
        """Return all of a tensor of this shape."""
        return cls.of_box(tuple((0, size) for size in shape))

    @classmethod
    def of_box(cls, box: Box) -> Part:
        """Return all of a box."""
        return cls(box, 0, box_size(box))

    @classmethod
    def of_boxes(cls, boxes: Sequence[Box]) -> Part:
        """Return all of some boxes, at least one, that lie side by side."""
        return cls(boxes[0], 0, sum(map(box_size, boxes)), tuple(boxes[1:]))

    @classmethod
    def flat(cls, shape: Sequence[int], start: int, stop: int) -> Part:
        """Return the range [start, stop) of a tensor of this shape, in row-major order."""
        return cls(tuple((0, size) for size in shape), start, stop)

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def boxes(self) -> tuple[Box, ...]:
        """All boxes."""
        return (self.box, *self.more)

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Return whether this is all of a tensor of this shape."""
        return self == Part.whole(shape)

    def fits(self, shape: Sequence[int]) -> bool:
        """Return whether the box lies within a tensor of this shape."""
        return len(self.box) == len(shape) and all(
            stop <= size for box in self.boxes for (_, stop), size in zip(box, shape, strict=True)
        )

    def range_within(self, start: int, stop: int) -> Part:
        """Return elements [start, stop) of this part, counted from its own first one."""
        if not 0 <= start <= stop <= self.count:
            raise UsageError(f"range [{start}, {stop}) of a part with {self.count} elements")
        return Part(self.box, self.start + start, self.start + stop, self.more)


@dataclass(frozen=True, slots=True)
class Run:
    """Elements that two parts have in common and that both hold side by side.

    Args:
        target: offset of the first one in the wanted part, in elements.
        source: offset of the first one in the part that is there.
        count: how many.
    """

    target: int
    source: int
    count: int


def box_size(box: Box) -> int:
    """Return the number of elements in a box."""
    return prod(stop - start for start, stop in box)


def joint_dim(boxes: Sequence[Box]) -> int | None:
    """Return the dim along which boxes lie side by side, in rising order; None if they do not."""
    dims = {
        dim for box in boxes[1:] for dim, (one, first) in enumerate(zip(box, boxes[0], strict=True)) if one != first
    }
    if len(dims) != 1:
        return None
    (dim,) = dims
    rising = all(one[dim][1] <= other[dim][0] for one, other in itertools.pairwise(boxes))
    return dim if rising else None


def runs(wanted: Part, there: Part) -> Iterator[Run]:
    """Yield what `wanted` can take from `there`, two parts of one tensor, in rising order of `target`."""
    if not wanted.count or not there.count:
        return
    ours, theirs = list(_members(wanted)), list(_members(there))
    if len(ours) == len(theirs) == 1:
        yield from _common(ours[0], theirs[0], wanted, there)
        return
    found = [run for own in ours for other in theirs for run in _common(own, other, wanted, there)]
    yield from sorted(found, key=lambda run: run.target)


@dataclass(frozen=True, slots=True)
class _Member:
    """One box of a part.

    Args:
        box: in indices of the tensor.
        first: number of its first element, in the order of the part's boxes together.
        steps: between neighbours along each dim, in that order.
        joint: the dim along which other boxes follow; None if there are none.
    """

    box: Box
    first: int
    steps: list[int]
    joint: int | None


def _members(part: Part) -> Iterator[_Member]:
    joint = joint_dim(part.boxes) if part.more else None
    sizes = [stop - start for start, stop in part.box]
    if joint is not None:
        sizes[joint] = sum(box[joint][1] - box[joint][0] for box in part.boxes)
    steps = _strides(sizes)
    before = 0
    for box in part.boxes:
        yield _Member(box, before * steps[joint] if joint is not None else 0, steps, joint)
        if joint is not None:
            before += box[joint][1] - box[joint][0]


def _common(own: _Member, other: _Member, wanted: Part, there: Part) -> Iterator[Run]:
    """Yield what a box of `wanted` can take from a box of `there`."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(own.box, other.box, strict=True))
    if any(start >= stop for start, stop in common):
        return
    # A row is contiguous in both parts: the last dims, in which both boxes agree, and the one before them.
    split = len(common)
    while (
        split
        and common[split - 1] == own.box[split - 1] == other.box[split - 1]
        and split - 1 not in (own.joint, other.joint)
    ):
        split -= 1
    outer = common[: max(split - 1, 0)]
    row = box_size(common[max(split - 1, 0) :])
    target, source = (
        member.first
        + sum((low - first) * step for (low, _), (first, _), step in zip(common, member.box, member.steps, strict=True))
        for member in (own, other)
    )
    sizes = [stop - start for start, stop in outer]
    for index in _rows(sizes, own.steps, target, row, wanted):
        begin = target + sum(i * step for i, step in zip(index, own.steps, strict=False))
        position = source + sum(i * step for i, step in zip(index, other.steps, strict=False))
        skip = max(0, wanted.start - begin, there.start - position)
        end = min(row, wanted.stop - begin, there.stop - position)
        if skip < end:
            yield Run(begin + skip - wanted.start, position + skip - there.start, end - skip)


def overlap(one: Part, other: Part) -> int:
    """Return how many elements two parts of one tensor have in common."""
    return sum(run.count for run in runs(one, other))


def _rows(sizes: Sequence[int], steps: Sequence[int], first: int, row: int, wanted: Part) -> Iterator[tuple[int, ...]]:
    """Yield the indices of the rows that reach into the range of `wanted`, in row-major order."""
    if not sizes:
        yield ()
        return
    inner = sizes[1:]
    reach = sum((size - 1) * step for size, step in zip(inner, steps[1:], strict=False)) + row
    for index in range(sizes[0]):
        begin = first + index * steps[0]
        if begin >= wanted.stop:
            return
        if begin + reach > wanted.start:
            for rest in _rows(inner, steps[1:], begin, row, wanted):
                yield (index, *rest)


def _strides(sizes: Sequence[int]) -> list[int]:
    steps = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        steps[dim] = steps[dim + 1] * sizes[dim + 1]
    return steps
