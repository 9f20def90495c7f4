"""Parts of tensors: what two of them have in common, by brute force over element numbers."""

from __future__ import annotations

import itertools
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidist.checkpoint.format.parts import Part, overlap, runs
from unidist.errors import UsageError


def elements(part: Part, shape: tuple[int, ...]) -> list[int]:
    """Return the numbers of the part's elements in the whole tensor, in the part's order."""
    steps = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # Boxes side by side differ in one dim: the product of the indices of all of them is what they have together.
    indices = itertools.product(
        *(sorted({i for box in part.boxes for i in range(*box[dim])}) for dim in range(len(shape)))
    )
    numbers = [sum(i * step for i, step in zip(index, steps, strict=True)) for index in indices]
    return numbers[part.start : part.stop]


@st.composite
def parts(draw: st.DrawFn, shape: tuple[int, ...]) -> Part:
    box = []
    for size in shape:
        # Whole dims often: that is where rows join.
        start, stop = draw(st.one_of(st.just((0, size)), st.tuples(st.integers(0, size), st.integers(0, size))))
        box.append((min(start, stop), max(start, stop)))
    more: list[tuple[tuple[int, int], ...]] = []
    if shape and box[(dim := draw(st.integers(0, len(shape) - 1)))][1] < shape[dim] and draw(st.booleans()):
        rest = sorted(draw(st.lists(st.integers(box[dim][1], shape[dim]), min_size=2, max_size=4, unique=True)))
        ranges = list(zip(rest[::2], rest[1::2], strict=False))
        more = [(*box[:dim], each, *box[dim + 1 :]) for each in ranges]
    count = sum(prod(stop - start for start, stop in each) for each in (box, *more))
    first, last = draw(st.one_of(st.just((0, count)), st.tuples(st.integers(0, count), st.integers(0, count))))
    return Part(tuple(box), min(first, last), max(first, last), tuple(more))


@st.composite
def two_parts(draw: st.DrawFn) -> tuple[tuple[int, ...], Part, Part]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    return shape, draw(parts(shape)), draw(parts(shape))


@given(two_parts())
def test_runs_are_what_two_parts_have_in_common(case: tuple[tuple[int, ...], Part, Part]) -> None:
    shape, wanted, there = case
    target, source = elements(wanted, shape), elements(there, shape)
    found = list(runs(wanted, there))
    pairs = [(run.target + i, run.source + i) for run in found for i in range(run.count)]
    assert all(target[a] == source[b] for a, b in pairs)
    assert sorted(target[a] for a, _ in pairs) == sorted(set(target) & set(source))
    assert [a for a, _ in pairs] == sorted(a for a, _ in pairs)
    assert overlap(wanted, there) == len(set(target) & set(source))


@given(st.lists(st.integers(1, 6), max_size=4).map(tuple), st.data())
def test_flat_ranges_that_meet_make_one_run_each(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = prod(shape)
    cut = data.draw(st.integers(0, count))
    low, high = Part.flat(shape, 0, cut), Part.flat(shape, cut, count)
    whole = Part.whole(shape)
    found = [run for part in (low, high) for run in runs(whole, part)]
    assert sum(run.count for run in found) == count
    assert len(found) == (cut > 0) + (cut < count)


def test_a_split_of_columns_has_a_run_per_row() -> None:
    left = Part.of_box(((0, 3), (0, 2)))
    assert [(run.target, run.source, run.count) for run in runs(Part.whole((3, 4)), left)] == [
        (0, 0, 2),
        (4, 2, 2),
        (8, 4, 2),
    ]


def test_a_scalar_has_one_element() -> None:
    assert Part.whole(()).count == 1
    assert [run.count for run in runs(Part.whole(()), Part.whole(()))] == [1]


def test_a_range_within_a_part_counts_from_its_start() -> None:
    part = Part.flat((4, 5), 6, 16)
    assert part.range_within(2, 5) == Part.flat((4, 5), 8, 11)
    with pytest.raises(UsageError, match=r"range \[2, 11\) of a part with 10 elements"):
        part.range_within(2, 11)


@pytest.mark.parametrize(("box", "start", "stop"), [(((0, 2),), 0, 3), (((2, 1),), 0, 0), (((0, 2),), 2, 1)])
def test_a_range_outside_of_its_box_is_refused(box: tuple[tuple[int, int], ...], start: int, stop: int) -> None:
    with pytest.raises(UsageError, match="box"):
        Part(box, start, stop)


def test_a_box_fits_into_shapes_that_hold_it() -> None:
    part = Part.of_box(((1, 3), (0, 2)))
    assert part.fits((3, 2))
    assert not part.fits((2, 2))
    assert not part.fits((3,))
    assert not part.is_whole((3, 2))
    assert Part.whole((3, 2)).is_whole((3, 2))
