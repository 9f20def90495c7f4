"""A resumed training has the losses of the undisturbed one, bit for bit: random numbers, data, scheduler, optimizer."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest
from part_pools import PartPools

pytest.importorskip("torch", reason="the trainings are in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _exact_resume import resumed

pytestmark = pytest.mark.parallel

STRATEGIES = [
    "data", "accumulate=3", "clip_norm=0.1", "precision=bf16", "precision=fp16", "zero=1", "zero=2", "zero=3",
    "zero=3:shared=false", "zero=2,precision=bf16", "tensor=2", "pipeline=2", "activations=recompute:blocks=0",
    "local_sgd=3", "precision=bf16:states=bf16", "zero=2,precision=bf16:states=bf16",
]  # fmt: skip


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


def check(rank_pools: PartPools, engine: str, strategy: str, *others: object) -> None:
    pool = rank_pools.get(2, engine=engine)
    for undisturbed, again, found in pool.run(resumed, (strategy, *others), timeout=timedelta(seconds=120)):
        assert len(undisturbed) == 3
        if "local_sgd" not in strategy:  # where saving averages the states of the optimizers
            assert again == undisturbed, "two runs differ"
        assert found == undisturbed, "the resumed run differs"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_after_a_checkpoint_are_those_of_the_undisturbed_run(
    rank_pools: PartPools, strategy: str, tmp_path: Path
) -> None:
    check(rank_pools, "shm", strategy, tmp_path / "saved")


@pytest.mark.parametrize("engine", ["tcp", "gloo"])
def test_over_other_engines(rank_pools: PartPools, engine: str, tmp_path: Path) -> None:
    check(rank_pools, engine, "zero=2", tmp_path / "saved")


@pytest.mark.parametrize("strategy", ["data", "zero=3", "pipeline=2"])
def test_with_asynchronous_saving(rank_pools: PartPools, strategy: str, tmp_path: Path) -> None:
    check(rank_pools, "shm", strategy, tmp_path / "saved", True)


def test_with_a_stream_of_samples(rank_pools: PartPools, tmp_path: Path) -> None:
    check(rank_pools, "shm", "data", tmp_path / "saved", False, True)
