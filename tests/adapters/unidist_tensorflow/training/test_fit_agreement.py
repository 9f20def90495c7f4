"""`fit` and `TrainStep` of Keras on TensorFlow decide the same on all ranks, and notice what one rank does alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from drift_keras import CASES, on_rank

from unidist.jobs.pool.pool import RankPool

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("case", [each.__name__ for each in CASES])
def test_ranks_agree(pool: Callable[..., RankPool], case: str) -> None:
    pool(2, "shm").run(on_rank, (case,))
