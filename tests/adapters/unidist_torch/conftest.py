"""Pools of ranks for the tests of the PyTorch adapter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unidist.runner import RankPool
from unidist.testing.pools import PoolCache

sys.path.insert(0, str(Path(__file__).parent))  # the ranks import `_training`; they get this process's path


@pytest.fixture(scope="package")
def pool() -> Iterator[Callable[..., RankPool]]:
    """Return `pool(num_proc, engine)`; pools are kept, but not so many that their ranks fill the memory."""
    with PoolCache(max_idle_ranks=10) as pools:

        def get(num_proc: int, engine: str = "auto") -> RankPool:
            return pools.get(num_proc, engine=engine, env={"OMP_NUM_THREADS": "1", "UNIDIST_TIMEOUT_SEC": "30"})

        yield get
