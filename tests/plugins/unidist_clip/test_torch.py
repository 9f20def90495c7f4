"""Clipping in PyTorch equals `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` of one process."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import clip_torch
from clip_torch import Case
from part_pools import PartPools

from unidist.testing.fixtures import RankPoolFactory

pytestmark = pytest.mark.parallel

LIMIT = 1e-12


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


def by_norm(limit: float, p: float) -> tuple[str, tuple[float, ...]]:
    return "clip_grad_norm_", (limit, p)


VALUE = ("clip_grad_value_", (0.02,))
CASES = [
    Case("clip_norm=0.5", (by_norm(0.5, 2),)),
    Case("clip_norm=2:p=1", (by_norm(2, 1),)),
    Case("clip_norm=0.3:p=3", (by_norm(0.3, 3),), sparse=True),
    Case("clip_norm=0.05:p=inf,accumulate=2", (by_norm(0.05, math.inf),), passes=2),
    Case("clip_value=0.02", (VALUE,), sparse=True),
    Case("accumulate=2,clip_value=0.02,clip_norm=0.1", (VALUE, by_norm(0.1, 2)), passes=2, sparse=True),
    Case("clip_norm=0.1,clip_value=0.02", (by_norm(0.1, 2), VALUE)),
    Case("clip_norm=0.5", (by_norm(0.5, 2),), sparse=True, as_dense=True),
    Case("clip_norm=1000", ()),
    Case("zero=1,clip_norm=0.5", (by_norm(0.5, 2),)),
    Case("clip_norm=0.05:p=inf,zero=2,accumulate=2", (by_norm(0.05, math.inf),), passes=2),
    Case("zero=2,clip_value=0.02,clip_norm=0.1:p=3", (VALUE, by_norm(0.1, 3))),
]


def largest_difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    assert found.keys() == expected.keys()
    return max(float(np.max(np.abs(found[name] - expected[name]))) for name in expected)


@pytest.fixture(scope="module")
def expected(rank_pools: PartPools) -> list[dict[str, Any]]:
    """What one process comes to."""
    found: list[dict[str, Any]] = rank_pools.get(1).run(clip_torch.train_in_one_process, (CASES,))[0]
    return found


@pytest.fixture(scope="module")
def unclipped(rank_pools: PartPools) -> list[dict[str, Any]]:
    """What it comes to where nothing is clipped."""
    cases = [Case(case.strategy, (), case.passes) for case in CASES]
    found: list[dict[str, Any]] = rank_pools.get(1).run(clip_torch.train_in_one_process, (cases,))[0]
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_clipping_over_ranks_gives_the_numbers_of_one_process(
    rank_pool: RankPoolFactory, expected: list[dict[str, Any]], unclipped: list[dict[str, Any]], size: int
) -> None:
    found = rank_pool(max(size, 2)).run(clip_torch.train_over_ranks, (CASES,), {"alone": size == 1})
    for number, case in enumerate(CASES):
        for rank in range(size):
            error = largest_difference(found[rank][number], expected[number])
            assert error <= LIMIT, f"{case} on rank {rank} differs by {error:.1e}"
        if case.clip:  # the limits are such that they change something
            assert largest_difference(expected[number], unclipped[number]) > 1e-3


def test_the_comparison_fails_where_each_rank_clips_its_own_gradient(
    rank_pool: RankPoolFactory, expected: list[dict[str, Any]]
) -> None:
    shares = [(CASES, (rank, 2)) for rank in range(2)]
    alone = rank_pool(2).run(clip_torch.train_in_one_process, per_rank_args=shares)
    for number in range(len(CASES)):
        mean = {name: (alone[0][number][name] + alone[1][number][name]) / 2 for name in expected[number]}
        assert largest_difference(mean, expected[number]) > 100 * LIMIT
