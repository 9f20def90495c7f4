"""What a script sees of ZeRO in PyTorch: state dicts, errors, ranks that join, values at stage 3."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from part_pools import PartPools

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1]))  # the ranks get this path too

from _torch_layer_drop_scripts import SCRIPTS as LAYER_DROP_SCRIPTS
from _torch_scripts import SCRIPTS, memory_after_zero_grad
from _torch_shared_scripts import SCRIPTS as SHARED_SCRIPTS
from _torch_user_scripts import SCRIPTS as USER_SCRIPTS

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_with_shared_updates(rank_pool: RankPoolFactory, name: str) -> None:
    script: Callable[[], Any] = SCRIPTS[name]
    assert rank_pool(2).run(script) == [None, None]


@pytest.mark.parametrize(
    ("strategy", "parameters"), [("zero=2:bucket_mb=4:shared=false", 2), ("zero=3:shared=false", 1)]
)
def test_gradient_shards_are_freed_after_the_update(rank_pool: RankPoolFactory, strategy: str, parameters: int) -> None:
    found = rank_pool(2).run(memory_after_zero_grad, (strategy,))
    after, backward = (sum(each) / 2 for each in zip(*found, strict=True))  # pages that both map count for either
    assert parameters + 2 < after < parameters + 2 + 0.6  # Adam's two moments; and two buckets of gradients, 0.33
    assert backward > after + 0.8  # the gradients


@pytest.mark.parametrize("name", SHARED_SCRIPTS)
def test_a_script_with_shared_parameters(rank_pool: RankPoolFactory, name: str) -> None:
    script: Callable[[], Any] = SHARED_SCRIPTS[name]
    assert rank_pool(2).run(script) == [None, None]


@pytest.mark.parametrize("name", USER_SCRIPTS)
def test_a_script_that_does_more_than_train(rank_pool: RankPoolFactory, name: str) -> None:
    script: Callable[[], Any] = USER_SCRIPTS[name]
    assert rank_pool(2).run(script) == [None, None]


@pytest.mark.parametrize("name", LAYER_DROP_SCRIPTS)
def test_a_script_that_leaves_out_layers(rank_pool: RankPoolFactory, name: str) -> None:
    script: Callable[[], Any] = LAYER_DROP_SCRIPTS[name]
    assert rank_pool(2).run(script) == [None, None]
