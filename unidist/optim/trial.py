"""Rules of the trial by which adapters find out whether an optimizer treats each element by itself.

An adapter steps on small tensors, whole and in parts, and compares. The tensors have the forms of the script's own, and
the steps are the first ones and late ones, so that a rule for large tensors, for some number of dims, or for later
steps shows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, TypeVar

LARGE = 160
"""The two largest dims of large tensors are cut to this: some optimizers (Adafactor) factor matrices from 128 on."""

SMALL = 2
"""The other dims of large tensors are cut to this, if there are enough elements."""

LATE_STEP = 16_128_000
"""A number of steps after which rules of later steps are in use, and those of each so many-th step soon are: a multiple
of all numbers to 10 and of 1000 and 1024. float32, in which some count, has it and its neighbours."""

Name = TypeVar("Name", bound=Hashable)


def trial_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the tensor that stands for one of this shape.

    With as many dims, none larger, and as many elements as `LARGE` squared if the tensor has that many: rules for large
    tensors (those of 8 bits) begin at some thousand elements.
    """
    if prod(shape) <= LARGE * LARGE:
        return tuple(shape)
    small = [min(size, SMALL) for size in shape]
    by_size = sorted(range(len(shape)), key=lambda dim: -shape[dim])
    for place, dim in enumerate([*by_size[1:2], *by_size[:1], *by_size[2:]]):
        least = LARGE if place < 2 else SMALL
        wanted = 0 if place == 0 and len(shape) > 1 else LARGE * LARGE // prod(small[:dim] + small[dim + 1 :])
        small[dim] = min(shape[dim], max(least, wanted))
    return tuple(small)


def trial_shapes(shapes: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the shapes for tensors of these shapes: each once, in the order of the first of them, without empty ones.

    (4, 6) where there are none.
    """
    return list(dict.fromkeys(trial_shape(shape) for shape in shapes if prod(shape))) or [(4, 6)]


def uneven_middle(count: int) -> int:
    """Return where a tensor of so many elements is cut in two: not where rows, or blocks of some elements, end."""
    return count // 2 - (count > 3)


def step_counters(records: Sequence[Mapping[Name, float]]) -> set[Name]:
    """Return the names of the numbers that count steps.

    Args:
        records: the numbers of an optimizer (in its state, its options, its attributes) after each of some steps.
    """
    found: set[Name] = set()
    for name in set(records[0]).intersection(*records[1:]) if records else ():
        values = [record[name] for record in records]
        rises = [after - before for before, after in pairwise(values)]
        if all(rise in (0, 1) for rise in rises) and any(rises):
            found.add(name)
    return found


def late_steps(options: Iterable[Any]) -> list[int]:
    """Return the numbers of steps after which an optimizer is tried again.

    Args:
        options: of the optimizer. A whole number among them may say when a rule begins.
    """
    numbers = {option for option in options if isinstance(option, int) and not isinstance(option, bool)}
    return [number - 2 for number in sorted({number for number in numbers if 3 < number < LATE_STEP} | {LATE_STEP})]
