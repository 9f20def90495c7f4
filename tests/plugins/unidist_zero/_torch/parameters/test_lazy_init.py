"""Models of PyTorch that are built without memory, at stage 3."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from part_pools import PartPools

from unidist.jobs.pool.pool import RankPool
from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2]))  # the ranks get this path too

from _torch_deferred_scripts import SCRIPTS, most_memory


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


@pytest.mark.parallel
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_model_that_was_built_without_memory(rank_pool: RankPoolFactory, name: str) -> None:
    script: Callable[[], Any] = SCRIPTS[name]
    assert rank_pool(2).run(script) == [None, None]


@pytest.mark.parallel
@pytest.mark.soak
def test_no_rank_ever_holds_the_whole_model() -> None:
    with RankPool(4) as pool:  # new processes: what the C library has kept of earlier tests would hide the peak
        found = pool.run(most_memory, ("meta",))[0]
    with RankPool(4) as pool:
        usual = pool.run(most_memory, ("cpu",))[0]
    assert usual > 1.0, "else it measures nothing"
    assert 0.25 < found < 0.25 + 0.4, "its share, and a few units that come and go"
