"""Strategies that act on parameters between two updates, under PyTorch."""

from __future__ import annotations

from typing import Any

import acting
import numpy as np
import pytest
import torch
from part_pools import PartPools

import unidist.torch as ud
from unidist.errors import UnidistError, UsageError

pytestmark = pytest.mark.parallel


def train(strategy: str, passes: int, *, closure: bool) -> tuple[Any, list[float]]:
    ud.init()
    try:
        model = torch.nn.Linear(3, 2, bias=False, dtype=torch.float64)
        model.weight.data = torch.tensor(acting.weights().T)
        acting.Halves.seen.clear()
        strategies = [*([strategy] if strategy else []), acting.Halves()]
        model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategies)
        for number in range(passes * acting.STEPS):
            x, y = (torch.tensor(each) for each in acting.batch(number, ud.rank(), ud.size()))

            def evaluate(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(x), y)
                loss.backward()
                return loss

            if closure:
                optimizer.step(evaluate)
            else:
                evaluate()
                optimizer.step()
        return model.weight.detach().numpy().T.copy(), acting.Halves.seen
    finally:
        ud.shutdown()


@pytest.mark.parametrize(
    ("strategy", "passes", "closure"),
    [("", 1, False), ("", 1, True), ("zero=1", 1, False), ("zero=2", 1, False), ("accumulate=2", 2, False)],
)
def test_it_acts_after_the_updates_that_it_wants(
    rank_pools: PartPools, strategy: str, passes: int, closure: bool
) -> None:
    for found, seen in rank_pools.get(2).run(train, (strategy, passes), {"closure": closure}):
        np.testing.assert_allclose(found, acting.expected(passes), rtol=0, atol=1e-14)
        assert seen == [pytest.approx(acting.weights().sum(), rel=1e-14)]


def test_a_rank_that_has_joined_is_refused(rank_pools: PartPools) -> None:
    def on_rank() -> str:
        ud.init()
        try:
            model = torch.nn.Linear(3, 2, dtype=torch.float64)
            model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), [acting.Halves()])
            for _ in range(2 if ud.rank() else 3):
                optimizer.zero_grad()
                model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
                optimizer.step()
            ud.join()
        except UnidistError as exc:
            return str(exc)
        finally:
            ud.shutdown()
        return ""

    found = rank_pools.get(2).run(on_rank)
    assert "rank 1 has joined, and halves acts on parameters after each update" in found[1]
    assert found[0], "a peer was lost"


def test_parameters_that_are_not_whole_are_refused(rank_pools: PartPools) -> None:
    def on_rank() -> str:
        with pytest.raises(UsageError) as caught:
            train("zero=3", 1, closure=False)
        return str(caught.value)

    for text in rank_pools.get(2).run(on_rank):
        assert "does not use this rank's own parameters as they are" in text
