"""Ranks for the tests of the JAX adapter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from part_pools import PartPools

pytest.importorskip("jax")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks import `_programs`; they get this process's path

_ENVIRONMENT = {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "UNIDIST_TIMEOUT_SEC": "60"}


@pytest.fixture
def two(jax_pools: PartPools) -> object:
    """Two ranks that compute in float64 where asked to."""
    return jax_pools.get(2, engine="shm")


@pytest.fixture
def one(jax_pools: PartPools) -> object:
    """One rank: JAX does not run in the process of the tests, which starts others by a fork."""
    return jax_pools.get(1)


@pytest.fixture(scope="session")
def device_pools() -> Iterator[PartPools]:
    """Two ranks with two devices each."""
    pools = PartPools(2, {**_ENVIRONMENT, "JAX_NUM_CPU_DEVICES": "2"})
    yield pools
    pools.close()


@pytest.fixture
def two_with_devices(device_pools: PartPools) -> object:
    """The same, over the engine shm."""
    return device_pools.get(2, engine="shm")


@pytest.fixture(scope="session")
def spmd_pools() -> Iterator[dict[int, PartPools]]:
    """Ranks that are one system of JAX, which cannot be divided: pools by the number of ranks."""
    pools = {size: PartPools(size, {**_ENVIRONMENT, "UNIDIST_ENGINE": "xla"}) for size in (2, 3)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def two_of_xla(spmd_pools: dict[int, PartPools]) -> object:
    """Two ranks with the engine xla."""
    return spmd_pools[2].get(2)
