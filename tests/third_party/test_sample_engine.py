"""The sample engine against the contract of communicators, and against one process."""

from __future__ import annotations

from typing import Any

import pytest

from unidist.testing import CommunicatorConformance
from unidist.testing.fixtures import RankPoolFactory

pytestmark = pytest.mark.parallel


class TestSampleSockets(CommunicatorConformance):
    engine = "sample-sockets"
    sizes = (1, 2, 3)
    detects_mismatch = False
    names_missing_ranks = False  # it knows whom it waits for, who may wait for another
    life_cycles = 10
    seeds = (1,)


def train(num_steps: int, *, distributed: bool = True) -> list[float]:
    """Return the parameters after some steps; each rank takes its share of a batch of 12."""
    import torch
    from torch import nn

    import unidist.torch as ud

    ud.init()
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        if distributed:
            _, optimizer = ud.distribute(model, optimizer)
        for step in range(num_steps):
            generator = torch.Generator().manual_seed(step)
            inputs = torch.randn(12, 5, dtype=torch.float64, generator=generator)
            labels = torch.randint(3, (12,), generator=generator)
            share = slice(12 // ud.size() * ud.rank(), 12 // ud.size() * (ud.rank() + 1))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[share]), labels[share]).backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    finally:
        ud.shutdown()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_train_as_one_process_does(rank_pool: RankPoolFactory, size: int) -> None:
    (expected,) = rank_pool(1).run(train, (10,))
    for found in rank_pool(size, engine="sample-sockets").run(train, (10,)):
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_without_the_exchange_they_would_not(rank_pool: RankPoolFactory) -> None:
    (expected,) = rank_pool(1).run(train, (10,))
    for found in rank_pool(2, engine="sample-sockets").run(train, (10,), {"distributed": False}):
        assert found != pytest.approx(expected, rel=1e-6)
