"""Which dim is cut after a reshape: each rank's part stays its part."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidist_tensor_parallel._jax.reshaping import reshaped
from unidist_tensor_parallel.layout.cuts import Cut, even


def part(array: Any, cut: Cut, rank: int) -> Any:
    return np.take(array, cut.indices(rank), cut.dim)


@pytest.mark.parametrize(
    ("cut", "before", "after", "wanted"),
    [
        (even(2, 12, 2), (3, 5, 12), (3, 5, 4, 3), even(2, 4, 2)),
        (even(2, 4, 2), (3, 5, 4, 3), (3, 5, 12), even(2, 12, 2)),
        (even(2, 12, 2), (3, 5, 12), (15, 12), even(1, 12, 2)),
        (Cut.of(1, [8, 8, 8], 2), (3, 24), (3, 3, 4, 2), even(2, 4, 2)),
        (even(2, 4, 2), (3, 3, 4, 2), (3, 24), Cut.of(1, [8, 8, 8], 2)),
        (even(1, 6, 2), (4, 6), (4, 1, 6, 1), even(2, 6, 2)),
        (even(2, 15, 3, unit=5), (3, 5, 15), (3, 5, 3, 5), even(2, 3, 3)),
        (even(1, 12, 3), (3, 12), (3, 2, 6), None),
        (even(1, 7, 2), (2, 7), (14,), Cut(0, ((4, 3), (4, 3)))),
    ],
)
def test_known_forms(cut: Cut, before: tuple[int, ...], after: tuple[int, ...], wanted: Cut | None) -> None:
    assert reshaped(cut, before, after) == wanted


@given(st.data())
def test_the_part_of_the_result_is_the_reshaped_part(data: Any) -> None:
    dims = st.integers(1, 6)
    factors = data.draw(st.lists(dims, min_size=1, max_size=5))
    before = merged(factors, data)
    after = merged(factors, data)
    candidates = [dim for dim, size in enumerate(before) if size > 1]
    if not candidates:
        return
    dim = data.draw(st.sampled_from(candidates))
    size = data.draw(st.integers(2, min(3, before[dim])))
    blocks = data.draw(st.sampled_from([n for n in (1, 2, 3) if before[dim] % n == 0 and before[dim] // n >= size]))
    cut = Cut.of(dim, [before[dim] // blocks] * blocks, size)
    found = reshaped(cut, before, after)
    array = np.arange(math.prod(before)).reshape(before)
    if found is None:
        return
    for rank in range(size):
        wanted = part(array.reshape(after), found, rank)
        np.testing.assert_array_equal(part(array, cut, rank).reshape(wanted.shape), wanted)


def merged(factors: list[int], data: Any) -> tuple[int, ...]:
    """Return a shape with the elements of these factors, some of them multiplied with the next one."""
    shape = [factors[0]]
    for factor in factors[1:]:
        if data.draw(st.booleans()):
            shape[-1] *= factor
        else:
            shape.append(factor)
    return tuple(shape)
