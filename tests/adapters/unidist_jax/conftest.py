"""Ranks for the tests of the JAX adapter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from part_pools import PartPools

pytest.importorskip("jax")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks import `_programs`; they get this process's path


@pytest.fixture
def two(jax_pools: PartPools) -> object:
    """Two ranks that compute in float64 where asked to."""
    return jax_pools.get(2, engine="shm")


@pytest.fixture
def one(jax_pools: PartPools) -> object:
    """One rank: JAX does not run in the process of the tests, which starts others by a fork."""
    return jax_pools.get(1)
