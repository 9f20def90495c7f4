"""Which dim is cut after an array was reshaped. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from unidist_tensor_parallel.layout.cuts import Cut


def reshaped(cut: Cut, before: Sequence[int], after: Sequence[int]) -> Cut | None:
    """Return the cut of a reshaped array, so that reshaping each rank's part gives its part of the result.

    Args:
        cut: of the array.
        before: its whole shape.
        after: the whole shape of the result.

    Returns:
        None if the elements of a rank are no cut of the result.
    """
    for dims, targets in _groups(before, after):
        if cut.dim not in dims:
            continue
        # First the group as one dim, in which the blocks repeat for each index of the dims before.
        place = dims.index(cut.dim)
        outer = prod(before[dim] for dim in dims[:place])
        inner = prod(before[dim] for dim in dims[place + 1 :])
        blocks = [tuple(count * inner for count in counts) for counts in cut.blocks] * outer
        return _cut_of_one(blocks, targets, [after[dim] for dim in targets])
    return None


def _cut_of_one(blocks: Sequence[tuple[int, ...]], targets: Sequence[int], sizes: Sequence[int]) -> Cut | None:
    """Return the cut of the dims into which one cut dim is divided; the one with the fewest blocks."""
    found: list[Cut] = []
    for place, (dim, size) in enumerate(zip(targets, sizes, strict=True)):
        outer, inner = prod(sizes[:place]), prod(sizes[place + 1 :])
        if len(blocks) % outer or size == 1:
            continue
        pattern = blocks[: len(blocks) // outer]
        if list(pattern) * outer != list(blocks) or any(count % inner for counts in pattern for count in counts):
            continue
        candidate = Cut(dim, tuple(tuple(count // inner for count in counts) for counts in pattern))
        if candidate.total == size:
            found.append(candidate)
    return min(found, key=lambda each: len(each.blocks), default=None)


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield dims of both shapes that have the same elements, as few at a time as possible."""
    i = j = 0
    while i < len(before) or j < len(after):
        dims, targets = [], []
        one = other = 1
        while True:
            if i < len(before) and (one <= other or j == len(after)):
                dims.append(i)
                one *= before[i]
                i += 1
            elif j < len(after):
                targets.append(j)
                other *= after[j]
                j += 1
            if one == other and dims and targets:
                break
            if i == len(before) and j == len(after):
                break
        yield dims, targets
