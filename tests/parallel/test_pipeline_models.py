"""Models over a pipeline that need a look of their own: statistics, 16 bits, dropout, unfreezing, refusals."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from part_pools import PartPools

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch", reason="the training is in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _torch_pipeline_models import batch_norm, beside_torch, narrow, random_numbers, refusals, unfreezing

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return torch_pools


def test_running_statistics_see_each_microbatch_as_in_one_process(rank_pool: RankPoolFactory) -> None:
    (first, held), (second, other) = rank_pool(2).run(batch_norm)
    assert max(first, second) < 1e-12
    assert not held & other, "each is on the rank of its stage only"
    assert {name for name in held | other if "running" in name} == {
        f"{number}.1.running_{what}" for number in range(4) for what in ("mean", "var")
    }


@pytest.mark.parametrize("precision", ["precision=fp16", "precision=bf16"])
def test_sixteen_bits_give_the_numbers_of_one_rank(rank_pool: RankPoolFactory, precision: str) -> None:
    # Both ranks with the same data: the mean over them changes nothing.
    expected, _ = rank_pool(2).run(narrow, (f"pipeline=1:microbatches=4,{precision}",))
    for schedule in ("1f1b", "zb-h1"):
        for found in rank_pool(2).run(narrow, (f"pipeline=2:schedule={schedule}:microbatches=4,{precision}",)):
            assert len(found) > 4
            for name, value in found.items():
                assert np.array_equal(value, expected[name]), f"{precision}, {schedule}: {name}"


def test_random_numbers_of_stages_differ_and_the_scripts_stay_alike(rank_pool: RankPoolFactory) -> None:
    (first, dropped), (second, other) = rank_pool(2).run(random_numbers)
    assert first == second
    assert len(dropped) == len(other) > 100
    assert 0.3 < np.mean(np.array(dropped) != np.array(other)) < 0.7, "two stages must not drop the same"


def test_layers_can_be_unfrozen(rank_pool: RankPoolFactory) -> None:
    assert max(rank_pool(2).run(unfreezing)) < 1e-12


def test_what_cannot_be_divided_is_refused_and_says_why(rank_pool: RankPoolFactory) -> None:
    told = {
        "branching": ("ConfigurationError", "Branching", "must not decide"),
        "too few parts": ("ConfigurationError", "too few parts for 2 stages"),
        "unknown point": ("ConfigurationError", "'nine'", "the model has: 0, 1, 2, 3"),
        "points": ("ConfigurationError", "2 stages begin at 1 split point", "1, 2"),
        "first point": ("ConfigurationError", "runs nothing before '0'"),
        "hooks": ("ConfigurationError", "hooks"),
        "zero=3": ("ConfigurationError", "zero=1"),
        "schedule": ("ConfigurationError", "2f2b", "1f1b"),
        "example": ("ConfigurationError", "example="),
        "statistics": ("ConfigurationError", "running statistics"),
        "distribute": ("ConfigurationError", "TrainStep"),
        "call": ("UsageError", "step.predict"),
        "arguments": ("UsageError", "do not fit"),
    }
    for found in rank_pool(2).run(refusals):
        for name, words in told.items():
            for word in words:
                assert word in found.get(name, "nothing was raised"), f"{name}: {found.get(name)}"


def test_pytorchs_own_pipeline_agrees(rank_pool: RankPoolFactory, tmp_path: Path) -> None:
    assert max(rank_pool(2).run(beside_torch, (str(tmp_path),))) < 1e-6
