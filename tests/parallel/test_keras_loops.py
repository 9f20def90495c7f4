"""Custom loops in Keras give the numbers of one process, or an error that says why not."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from part_pools import PartPools

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("tensorflow")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _keras_loops import added_up, alone, averaged, leaves_out, on_rank, without_variables

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return tensorflow_pools


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("strategy", ["data", "zero=1", "zero=2,clip_norm=0.1", "zero=3", "zero=3,clip_norm=0.1"])
def test_gradients_of_several_passes_are_added_by_hand(rank_pool: RankPoolFactory, strategy: str, graph: bool) -> None:
    (expected,) = rank_pool(1).run(alone, (0.1 if "clip" in strategy else None,))
    for found in rank_pool(2).run(on_rank, (strategy, graph)):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


def test_layers_that_only_one_rank_leaves_out(rank_pool: RankPoolFactory) -> None:
    for message in rank_pool(2).run(leaves_out):
        assert "rank 0 'values of block2', rank 1 'values of block1'" in message


def test_a_model_without_variables_is_refused_when_it_is_distributed(rank_pool: RankPoolFactory) -> None:
    for message in rank_pool(2).run(without_variables):
        assert "build it before distribute" in message


@pytest.mark.parametrize("strategy", ["data", "zero=2", "zero=3"])
def test_gradients_are_added_up_over_the_ranks(rank_pool: RankPoolFactory, strategy: str) -> None:
    (expected,) = rank_pool(1).run(averaged, (strategy,))
    for found in rank_pool(2).run(added_up, (strategy,)):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)
