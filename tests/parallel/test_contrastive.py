"""Losses that compare samples of all ranks train as those of one process on the whole batch, in PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from part_pools import PartPools

pytest.importorskip("torch", reason="the training is in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _torch_contrastive import errors_of

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return torch_pools


@pytest.mark.parametrize(
    ("ranks", "strategies"),
    [(2, ["data", "zero=2", "zero=3", "tensor=2"]), (4, ["data", "tensor=2", "tensor=2,zero=1"])],
)
def test_contrastive_losses_have_the_numbers_of_one_process(
    torch_pools: PartPools, ranks: int, strategies: list[str]
) -> None:
    cases = [(loss, strategy, "samples") for loss in ("whole", "local") for strategy in strategies]
    cases.append(("whole", "data", "uneven"))
    for found in torch_pools.get(ranks).run(errors_of, (cases,)):
        for case, (error, warned) in zip(cases, found, strict=True):
            assert error < 1e-12, case
            assert warned == []


def test_the_gradient_of_horovods_allgather_is_another_one_and_says_so(torch_pools: PartPools) -> None:
    cases = [("whole", "data", "allgather"), ("local", "data", "allgather")]
    for rank, found in enumerate(torch_pools.get(2).run(errors_of, (cases,))):
        for error, warned in found:
            assert error > 1e-3
            assert [text for text in warned if "Use ud.gather_samples(tensor)" in text] == warned
            assert len(warned) == (rank == 0)
