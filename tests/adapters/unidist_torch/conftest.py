"""Pools of ranks for the tests of the PyTorch adapter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_pools import EnginePool

from unidist.testing.pools import PoolCache

sys.path.insert(0, str(Path(__file__).parent))  # the ranks import `_training`; they get this process's path


_pools = PoolCache()


@pytest.fixture
def pool() -> Callable[..., EnginePool]:
    """Return `pool(num_proc, engine)`; the ranks are kept for all tests of this folder, and serve every engine."""

    def get(num_proc: int, engine: str = "auto") -> EnginePool:
        ranks = _pools.get(num_proc, env={"OMP_NUM_THREADS": "1", "UNIDIST_TIMEOUT_SEC": "60"})
        return EnginePool(ranks, engine)

    return get


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the pools after the last test of this folder: other folders need the memory."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _pools.close()
