"""`torch.compile` before and after `distribute`: the numbers of one process, in training and in a checkpoint."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

import torch
from _compiled_models import adam, network, on_rank, train

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize(
    ("strategy", "when"),
    [
        ("data", "wrapped"),
        ("data", "in buckets"),
        ("tensor=2", "wrapped"),
        ("tensor=2", "traced"),
        ("tensor=2", "in place"),
        ("zero=3:shared=false", "traced"),
        ("zero=3:shared=false", "afterwards"),
    ],
)
def test_numbers_and_checkpoints_are_those_of_one_process(rank_pool: RankPoolFactory, strategy: str, when: str) -> None:
    alone = network()
    wanted = train(alone, adam(alone))
    first, second = rank_pool(2).run(on_rank, (strategy, when), timeout=timedelta(seconds=120))
    losses = first[0] if strategy == "tensor=2" else [(a + b) / 2 for a, b in zip(first[0], second[0], strict=True)]
    torch.testing.assert_close(losses, wanted, rtol=1e-12, atol=1e-12)
    values = [value.tolist() for value in alone.state_dict().values()]
    for found, expected in zip(first[1], values, strict=True):
        torch.testing.assert_close(
            *(torch.tensor(each, dtype=torch.float64) for each in (found, expected)), rtol=1e-12, atol=1e-12
        )
    zero, tensor, core = first[2]
    assert core, "the compiler traces our code, which takes it minutes"
    assert zero or "zero" not in strategy
    assert tensor or "tensor" not in strategy
