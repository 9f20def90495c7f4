"""`fit` and `TrainStep` of Keras on JAX make the same decisions on all ranks, and notice what one rank does alone."""

from __future__ import annotations

import pytest
from drift_keras import CASES, on_rank
from part_pools import PartOfPool

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("case", [each.__name__ for each in CASES])
def test_ranks_agree(two: PartOfPool, case: str) -> None:
    two.run(on_rank, (case,))
