"""Pools of ranks for the tests of the TensorFlow adapter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from unidist.runner import RankPool
from unidist.testing.pools import PoolCache

pytest.importorskip("tensorflow")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks import `_modes`; they get this process's path

# One inter-operation thread: whatever waits for a peer on it would hang.
_ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "OMP_NUM_THREADS": "1",
    "UNIDIST_TIMEOUT_SEC": "20",
    "CUDA_VISIBLE_DEVICES": "",
}


_pools = PoolCache(max_idle_ranks=8)  # not so many that their ranks fill the memory


@pytest.fixture
def pool() -> Callable[..., RankPool]:
    """Return `pool(num_proc, engine)`; pools are kept for all tests of this folder."""

    def get(num_proc: int, engine: str = "auto") -> RankPool:
        return _pools.get(num_proc, engine=engine, env=_ENVIRONMENT)

    return get


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the pools after the last test of this folder: other folders need the memory."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        _pools.close()
