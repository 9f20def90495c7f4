"""Clipping in Keras, however a step is run, gives the numbers of one process, of which sparse gradients are a part."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")

import clip_keras
from clip_keras import Case
from part_pools import PartPools

from unidist.testing.fixtures import RankPoolFactory

pytestmark = pytest.mark.parallel

LIMIT = 1e-12
CASES = [
    Case("clip_norm=0.5", (("norm", (0.5, 2.0)),), "eager"),
    Case("clip_norm=2:p=1", (("norm", (2.0, 1.0)),), "function"),
    Case("clip_norm=0.3:p=3", (("norm", (0.3, 3.0)),), "fit"),
    Case("clip_norm=0.05:p=inf,accumulate=2", (("norm", (0.05, math.inf)),), "function", passes=2),
    Case("clip_value=0.02", (("value", (0.02,)),), "function"),
    Case("accumulate=2,clip_value=0.02,clip_norm=0.1", (("value", (0.02,)), ("norm", (0.1, 2.0))), "fit", passes=2),
    Case("clip_norm=0.5", (("norm", (0.5, 2.0)),), "tape"),
    Case("zero=1,clip_norm=2:p=1", (("norm", (2.0, 1.0)),), "function"),
    Case("zero=2,clip_value=0.02,clip_norm=0.1", (("value", (0.02,)), ("norm", (0.1, 2.0))), "fit"),
]


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return tensorflow_pools


def largest_difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    assert found.keys() == expected.keys()
    return max(float(np.max(np.abs(found[name] - expected[name]))) for name in expected)


@pytest.fixture(scope="module")
def expected(rank_pools: PartPools) -> list[dict[str, Any]]:
    """What one process comes to, and then what it comes to where nothing is clipped."""
    unclipped = [Case(case.strategy, (), passes=case.passes) for case in CASES]
    found: list[dict[str, Any]] = rank_pools.get(1).run(clip_keras.train_in_one_process, (CASES + unclipped,))[0]
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_clipping_over_ranks_gives_the_numbers_of_one_process(
    rank_pool: RankPoolFactory, expected: list[dict[str, Any]], size: int
) -> None:
    found = rank_pool(2).run(clip_keras.train_over_ranks, (CASES,), {"alone": size == 1})
    for number, case in enumerate(CASES):
        for rank in range(size):
            error = largest_difference(found[rank][number], expected[number])
            assert error <= LIMIT, f"{case} on rank {rank} differs by {error:.1e}"
        # The limits are such that they change something.
        assert largest_difference(expected[number], expected[len(CASES) + number]) > 1e-3
