"""Strategies in pairs and triples give the numbers of one process in Keras, too."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest
from composition_lines import check, lines
from part_pools import PartPools

from unidist.registry import Registry
from unidist.runtime.plugin_manager import PluginManager
from unidist.strategy import StrategySpec
from unidist.testing.pools import PoolCache

pytest.importorskip("tensorflow", reason="the training is in Keras")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _keras_compositions import errors_of
from tensorflow_ranks import ENVIRONMENT

pytestmark = pytest.mark.parallel

CHOICES = (
    ("zero=1", "zero=2", "zero=3"),
    ("tensor=2", "tensor=2:sequence=true"),
    ("pipeline=2:microbatches=2",),
    ("accumulate=2",),
    ("activations=recompute",),
    ("clip_norm=0.05",),
)
TIMEOUT = timedelta(minutes=30)


@pytest.fixture(scope="module")
def registry() -> Registry[StrategySpec]:
    """The registered strategies."""
    return PluginManager().load().strategies


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return tensorflow_pools


def test_a_layer_may_be_cut_after_it_is_recomputed(tensorflow_pools: PartPools) -> None:
    check(tensorflow_pools.get(2).run(errors_of, (["tensor=2,activations=recompute"],)))


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("count", [2, 3])
def test_the_numbers_of_one_process(registry: Registry[StrategySpec], count: int, ranks: int) -> None:
    # With Keras zero=3 recomputes every layer by itself.
    tried = [line for line in lines(CHOICES, count, ranks, registry) if not ("zero=3" in line and "recompute" in line)]
    assert tried
    with PoolCache() as pools:
        check(pools.get(ranks, env=ENVIRONMENT).run(errors_of, (tried,), timeout=TIMEOUT))
