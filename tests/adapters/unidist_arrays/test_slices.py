"""Rows of sparse gradients as arrays."""

from __future__ import annotations

import numpy as np
import pytest

from unidist_arrays.slices import Slices


@pytest.mark.parametrize("rest", [(), (3,), (2, 2)])
def test_elements_are_those_of_the_flat_gradient_with_each_occurrence_by_itself(rest: tuple[int, ...]) -> None:
    shape = (5, *rest)
    indices = np.array([4, 1, 1, 0, 4, 1])
    rows = Slices(np.random.default_rng(0).standard_normal((6, *rest)), indices)
    flat = rows.dense(shape).reshape(-1)
    squares = Slices(np.square(rows.values), indices).dense(shape).reshape(-1)
    for begin in range(flat.size):
        for end in range(begin, flat.size + 1):
            elements = rows.elements(begin, end)
            for values, whole in ((elements.values, flat), (np.square(elements.values), squares)):
                found = np.zeros(flat.size)
                np.add.at(found, elements.indices, values)
                np.testing.assert_allclose(found[begin:end], whole[begin:end], rtol=1e-14)
                assert not found[:begin].any()
                assert not found[end:].any()
