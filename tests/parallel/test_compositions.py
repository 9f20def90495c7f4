"""Strategies in pairs and triples give the numbers of one process: causal attention, rotary positions, tied weights."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest
from composition_lines import check, lines

from unidist.registry import Registry
from unidist.runtime.plugin_manager import PluginManager
from unidist.strategy import StrategySpec
from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch", reason="the training is in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _torch_compositions import errors_of

pytestmark = pytest.mark.parallel

CHOICES = (
    ("zero=1", "zero=2", "zero=3", "zero=3:shared=false"),
    ("tensor=2", "tensor=2:sequence=true"),
    ("pipeline=2:microbatches=2", "pipeline=2:microbatches=4:schedule=interleaved"),
    ("accumulate=2",),
    ("activations=recompute",),
    ("clip_norm=0.3",),
)
TIMEOUT = timedelta(minutes=30)


@pytest.fixture(scope="module")
def registry() -> Registry[StrategySpec]:
    """The registered strategies."""
    return PluginManager().load().strategies


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.soak)])
def test_in_pairs(rank_pool: RankPoolFactory, registry: Registry[StrategySpec], ranks: int) -> None:
    tried = lines(CHOICES, 2, ranks, registry)
    assert tried
    check(rank_pool(ranks).run(errors_of, (tried,), timeout=TIMEOUT))


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_in_triples(rank_pool: RankPoolFactory, registry: Registry[StrategySpec], ranks: int) -> None:
    tried = lines(CHOICES, 3, ranks, registry)
    assert tried
    check(rank_pool(ranks).run(errors_of, (tried,), timeout=TIMEOUT))


def test_a_difference_is_seen(rank_pool: RankPoolFactory) -> None:
    found = rank_pool(2).run(errors_of, (["clip_norm=0.4"],))  # one process clips at 0.3
    with pytest.raises(AssertionError, match=r"clip_norm=0\.4: \[0"):
        check(found)
