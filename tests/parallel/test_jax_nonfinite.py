"""`--on-nonfinite` with JAX."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest
from part_pools import PartPools

pytest.importorskip("jax", reason="the training is in JAX")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _nonfinite import jax_script

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(jax_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return jax_pools


def test_a_bad_gradient_is_an_error_on_every_rank(rank_pools: PartPools) -> None:
    pool = rank_pools.get(2, engine="shm", env={"UNIDIST_ON_NONFINITE": "error"})
    for text in pool.run(jax_script, (True,), timeout=timedelta(seconds=120)):
        assert "of 'w' on rank 1 (nan)" in text
    assert pool.run(jax_script, (False,), timeout=timedelta(seconds=120)) == ["", ""]
