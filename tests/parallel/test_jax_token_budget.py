"""Batches of a budget of tokens in JAX have, on several ranks, the losses of one process on the same samples."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from part_pools import PartPools
from token_budget_cases import COUNT, largest_difference, together

pytest.importorskip("jax", reason="the training is in JAX")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _jax_token_budget import alone, refused_in_elastic_steps, trained

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(jax_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return jax_pools


@pytest.mark.parametrize(("line", "ranks"), [("data", 2), ("data", 3), ("zero=3", 2)])
def test_the_losses_of_one_process(jax_pools: PartPools, line: str, ranks: int) -> None:
    outcomes = jax_pools.get(ranks).run(trained, (line,))
    steps = together([seen for _, seen in outcomes])
    assert set(range(COUNT)) == {index for step in steps for index in step}
    assert len({len(step) for step in steps}) > 1
    (expected,) = jax_pools.get(1).run(alone, (steps,))
    for losses, _ in outcomes:
        assert largest_difference(losses, expected) < 1e-12
    plain, _ = jax_pools.get(ranks).run(trained, (line,), {"weighted": False})[0]
    assert largest_difference(plain, expected) > 1e-6


def test_elastic_steps_refuse_them(jax_pools: PartPools) -> None:
    for text in jax_pools.get(2).run(refused_in_elastic_steps):
        assert "2 samples, shuffled with seed=0, in batches of at most 9 tokens" in text
        assert "no max_tokens" in text
