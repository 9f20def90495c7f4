"""Losses that are divided by what counts in a batch: Keras on JAX has the numbers of one process."""

from __future__ import annotations

import pytest
from counted_keras import CASES, on_rank
from part_pools import PartOfPool

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_the_numbers_are_those_of_one_process(two: PartOfPool, case: tuple[str, str]) -> None:
    two.run(on_rank, case)
