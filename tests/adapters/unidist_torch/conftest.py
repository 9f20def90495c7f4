"""Pools of ranks for the tests of the PyTorch adapter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from unidist.runner import RankPool
from unidist.testing.pools import PoolCache

sys.path.insert(0, str(Path(__file__).parent))  # the ranks import `_training`; they get this process's path


_pools = PoolCache(max_idle_ranks=10)  # not so many that their ranks fill the memory


@pytest.fixture
def pool() -> Callable[..., RankPool]:
    """Return `pool(num_proc, engine)`; pools are kept for all tests of this folder."""

    def get(num_proc: int, engine: str = "auto") -> RankPool:
        return _pools.get(num_proc, engine=engine, env={"OMP_NUM_THREADS": "1", "UNIDIST_TIMEOUT_SEC": "30"})

    return get


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the pools after the last test of this folder: other folders need the memory."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _pools.close()
