"""Batches of a budget of tokens on several ranks have the losses of one process on the same samples."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from part_pools import PartPools

pytest.importorskip("torch", reason="the training is in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _torch_token_budget import COUNT, alone, trained

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return torch_pools


@pytest.mark.parametrize("line", ["data", "zero=3"])
def test_the_losses_of_one_process(torch_pools: PartPools, line: str) -> None:
    outcomes = torch_pools.get(2).run(trained, (line,))
    steps = [[*one, *other] for one, other in zip(*(seen for _, seen in outcomes), strict=True)]
    assert set(range(COUNT)) == {index for step in steps for index in step}
    assert len({len(step) for step in steps}) > 1
    (expected,) = torch_pools.get(1).run(alone, (steps,))
    for each, _ in outcomes:
        assert max(abs(one - other) for one, other in zip(each, expected, strict=True)) < 1e-12
    plain, _ = torch_pools.get(2).run(trained, (line,), {"weighted": False})[0]
    assert max(abs(one - other) for one, other in zip(plain, expected, strict=True)) > 1e-6
