"""Which elements of a tensor: a box, and in the box's row-major order a flat range. Pure arithmetic.

A tensor that is split along a dim (tensor parallelism) is cut into boxes; one that is sharded in flat ranges (ZeRO)
into ranges of the whole box; and both together into ranges of a box.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from unidist.errors import UsageError

Box = tuple[tuple[int, int], ...]
"""`(start, stop)` per dim."""


@dataclass(frozen=True, slots=True)
class Part:
    """A flat range of a box of a tensor.

    Args:
        box: `(start, stop)` per dim, in indices of the whole tensor; `()` for a scalar.
        start: of the range, counted over the elements of the box in row-major order.
        stop: end of the range.
    """

    box: Box
    start: int
    stop: int

    def __post_init__(self) -> None:
        size = box_size(self.box)
        if any(not 0 <= low <= high for low, high in self.box) or not 0 <= self.start <= self.stop <= size:
            raise UsageError(f"range [{self.start}, {self.stop}) of the box {self.box} with {size} elements")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Part:
        """Return all of a tensor of this shape."""
        return cls.of_box(tuple((0, size) for size in shape))

    @classmethod
    def of_box(cls, box: Box) -> Part:
        """Return all of a box."""
        return cls(box, 0, box_size(box))

    @classmethod
    def flat(cls, shape: Sequence[int], start: int, stop: int) -> Part:
        """Return the range [start, stop) of a tensor of this shape, in row-major order."""
        return cls(tuple((0, size) for size in shape), start, stop)

    @property
    def count(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Say whether this is all of a tensor of this shape."""
        return self == Part.whole(shape)

    def fits(self, shape: Sequence[int]) -> bool:
        """Say whether the box lies within a tensor of this shape."""
        return len(self.box) == len(shape) and all(
            stop <= size for (_, stop), size in zip(self.box, shape, strict=True)
        )

    def range_within(self, start: int, stop: int) -> Part:
        """Return elements [start, stop) of this part, counted from its own first one."""
        if not 0 <= start <= stop <= self.count:
            raise UsageError(f"range [{start}, {stop}) of a part with {self.count} elements")
        return Part(self.box, self.start + start, self.start + stop)


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


def runs(wanted: Part, there: Part) -> Iterator[Run]:
    """Yield what `wanted` can take from `there`, two parts of one tensor, in rising order of `target`."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted.box, there.box, strict=True))
    if any(start >= stop for start, stop in common) or not wanted.count or not there.count:
        return
    # A row is what lies side by side in both boxes: dims that both span alike, and the one before them.
    split = len(common)
    while split and common[split - 1] == wanted.box[split - 1] == there.box[split - 1]:
        split -= 1
    outer = common[: max(split - 1, 0)]
    row = box_size(common[max(split - 1, 0) :])
    target_steps, source_steps = _strides(wanted.box), _strides(there.box)
    target = sum(
        (low - first) * step for (low, _), (first, _), step in zip(common, wanted.box, target_steps, strict=True)
    )
    source = sum(
        (low - first) * step for (low, _), (first, _), step in zip(common, there.box, source_steps, strict=True)
    )
    sizes = [stop - start for start, stop in outer]
    for index in _rows(sizes, target_steps, target, row, wanted):
        begin = target + sum(i * step for i, step in zip(index, target_steps, strict=False))
        other = source + sum(i * step for i, step in zip(index, source_steps, strict=False))
        skip = max(0, wanted.start - begin, there.start - other)
        end = min(row, wanted.stop - begin, there.stop - other)
        if skip < end:
            yield Run(begin + skip - wanted.start, other + skip - there.start, end - skip)


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


def _strides(box: Box) -> list[int]:
    steps = [1] * len(box)
    for dim in range(len(box) - 2, -1, -1):
        start, stop = box[dim + 1]
        steps[dim] = steps[dim + 1] * (stop - start)
    return steps
