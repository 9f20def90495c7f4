"""Ranks with batches of different size: Keras on JAX has the numbers of one process on the whole batches."""

from __future__ import annotations

import pytest
from part_pools import PartOfPool
from uneven_keras import CASES, on_rank

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_samples_weigh_alike(two: PartOfPool, case: tuple[str, str, str]) -> None:
    two.run(on_rank, ([case],))
