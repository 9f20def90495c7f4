"""Ranks for the tests of the PyTorch adapter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from part_pools import PartOfPool, PartPools

sys.path.insert(0, str(Path(__file__).parent))  # the ranks import `_training`; they get this process's path


@pytest.fixture
def pool(torch_pools: PartPools) -> Callable[..., PartOfPool]:
    """Return `pool(num_proc, engine)`; the ranks serve every engine, and all tests of PyTorch."""

    def get(num_proc: int, engine: str = "auto") -> PartOfPool:
        return torch_pools.get(num_proc, engine=engine)

    return get
