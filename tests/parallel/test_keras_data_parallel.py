"""Data parallelism, plain and accumulating, gives the numbers of one process in TensorFlow, however a step is run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from tensorflow_ranks import ENVIRONMENT

from unidist.testing import PoolCache, StrategyConformance
from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("tensorflow", reason="the training is in Keras")
pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools() -> Iterator[PoolCache]:
    """Pools of this module alone, which end with it: ranks with TensorFlow are large."""
    with PoolCache() as cache:
        yield cache


@pytest.fixture
def rank_pool(rank_pools: PoolCache) -> RankPoolFactory:
    """A function that returns a pool of ranks for TensorFlow."""
    return partial(rank_pools.get, env=ENVIRONMENT)


class KerasConformance(StrategyConformance):
    framework = "tensorflow"
    modes = ("eager", "function", "fit")
    sizes = (2,)  # other numbers, and other engines, are in test_training_parity


class TestKerasDataParallel(KerasConformance):
    pass


class TestKerasAccumulatingTheMean(KerasConformance):
    strategy = "accumulate=4"
    passes = 4
    optimizers = ("adamw",)


class TestKerasAccumulatingTheSum(KerasConformance):
    strategy = "accumulate=4:reduction=sum"
    passes = 4
    loss_factor = 4.0  # the sum over four passes is four times their mean
    optimizers = ("sgd",)  # Adam's updates are the same
