"""Pools of ranks for the tests of the PyTorch adapter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unidist.runner import RankPool

sys.path.insert(0, str(Path(__file__).parent))  # the ranks import `_training`; they get this process's path


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[..., RankPool]]:
    """Return `pool(num_proc, engine)`; pools are kept for the whole session."""
    pools: dict[tuple[int, str], RankPool] = {}

    def get(num_proc: int, engine: str = "auto") -> RankPool:
        key = (num_proc, engine)
        if key not in pools:
            pools[key] = RankPool(num_proc, engine=engine, env={"OMP_NUM_THREADS": "1", "UNIDIST_TIMEOUT_SEC": "30"})
        return pools[key]

    yield get
    for made in pools.values():
        made.close()
