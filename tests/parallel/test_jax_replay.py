"""`--verify replay=N` with JAX, and with Keras on JAX."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest
from part_pools import PartPools

pytest.importorskip("jax", reason="the training is in JAX")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _replay import jax_script, keras_script

pytestmark = pytest.mark.parallel
LIMIT = timedelta(seconds=120)


@pytest.fixture(scope="module")
def rank_pools(jax_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return jax_pools


@pytest.mark.parametrize("strategy", ["data", "zero=1,accumulate=2"])
def test_a_batch_that_is_computed_twice_leaves_no_trace(rank_pools: PartPools, strategy: str) -> None:
    pool = rank_pools.get(2, engine="shm")
    expected = pool.run(jax_script, (strategy, "first"), timeout=LIMIT)
    assert pool.run(jax_script, (strategy, "replay=2"), timeout=LIMIT) == expected


def test_with_keras(rank_pools: PartPools) -> None:
    pool = rank_pools.get(2, engine="shm", env={"KERAS_BACKEND": "jax"})
    assert pool.run(keras_script, ("replay=2",), timeout=LIMIT) == pool.run(keras_script, ("first",), timeout=LIMIT)
    for text, _ in pool.run(keras_script, ("replay=2", True), timeout=LIMIT):
        assert "(rank 1 on " in text
