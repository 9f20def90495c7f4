"""Pools of ranks for the tests of the TensorFlow adapter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_pools import EnginePool
from part_pools import PartOfPool, PartPools
from tensorflow_ranks import ENVIRONMENT

from unidist.testing.pools import PoolCache

pytest.importorskip("tensorflow")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks import `_modes`; they get this process's path

_pools = PoolCache()  # of ranks with variables that TensorFlow reads when it is imported


@pytest.fixture
def pool(tensorflow_pools: PartPools) -> Callable[..., EnginePool | PartOfPool]:
    """Return `pool(num_proc, engine, VARIABLE="value")`; ranks serve every engine, without variables all tests."""

    def get(num_proc: int, engine: str = "auto", **variables: str) -> EnginePool | PartOfPool:
        if not variables:
            return tensorflow_pools.get(num_proc, engine=engine)
        return EnginePool(_pools.get(num_proc, env={**ENVIRONMENT, **variables}), engine)

    return get


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the pools after the last test of this folder: other folders need the memory."""
    if nextitem is None or not nextitem.path.is_relative_to(Path(__file__).parent):
        _pools.close()
