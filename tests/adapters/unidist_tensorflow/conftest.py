"""Pools of ranks for the tests of the TensorFlow adapter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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


@pytest.fixture(scope="package")
def pool() -> Iterator[Callable[..., RankPool]]:
    """Return `pool(num_proc, engine)`; importing TensorFlow takes seconds, so pools are kept, within the memory."""
    with PoolCache(max_idle_ranks=8) as pools:

        def get(num_proc: int, engine: str = "auto") -> RankPool:
            return pools.get(num_proc, engine=engine, env=_ENVIRONMENT)

        yield get
