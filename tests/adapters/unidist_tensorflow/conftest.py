"""Pools of ranks for the tests of the TensorFlow adapter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_pools import EnginePool
from tensorflow_ranks import ENVIRONMENT

from unidist.testing.pools import PoolCache

pytest.importorskip("tensorflow")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks import `_modes`; they get this process's path

_pools = PoolCache(max_idle_ranks=8)  # not so many that their ranks fill the memory


@pytest.fixture
def pool() -> Callable[..., EnginePool]:
    """Return `pool(num_proc, engine, VARIABLE="value")`; the ranks are kept for this folder, and serve every engine."""

    def get(num_proc: int, engine: str = "auto", **variables: str) -> EnginePool:
        return EnginePool(_pools.get(num_proc, env={**ENVIRONMENT, **variables}), engine)

    return get


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the pools after the last test of this folder: other folders need the memory."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _pools.close()
