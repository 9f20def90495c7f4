"""`clip_grad_norm_` of the facade gives the numbers of PyTorch's in one process, with every strategy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import clip_torch
import torch
from clip_torch import Case
from part_pools import PartPools

import unidist.torch as ud
from unidist.errors import UsageError
from unidist.settings.environment import set_variables
from unidist.testing.fixtures import RankPoolFactory
from unidist_zero import gathered

LIMIT, ORDER = 0.3, 2.0
CASES = [
    Case("data", (("clip_grad_norm_", (LIMIT, ORDER)),), sparse=True),
    Case("accumulate=2", (("clip_grad_norm_", (LIMIT, ORDER)),), passes=2),
    Case("zero=1", (("clip_grad_norm_", (LIMIT, ORDER)),)),
    Case("zero=2,accumulate=2", (("clip_grad_norm_", (LIMIT, ORDER)),), passes=2),
    Case("zero=3", (("clip_grad_norm_", (LIMIT, ORDER)),)),
    Case("data", (("clip_grad_norm_", (LIMIT, ORDER)),), sparse=True, as_dense=True),
]


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


def train(cases: list[Case]) -> list[tuple[dict[str, Any], list[float]]]:
    results = []
    for case in cases:
        with set_variables({"UNIDIST_STRATEGY": case.strategy}):
            ud.init()
            try:
                results.append(_train(case))
            finally:
                ud.shutdown()
    return results


def _train(case: Case) -> tuple[dict[str, Any], list[float]]:
    model: Any = clip_torch.Model(case.sparse)
    optimizer: Any = clip_torch._optimizer(model)
    if case.as_dense:
        optimizer = ud.DistributedOptimizer(optimizer, sparse_as_dense=True)
    else:
        model, optimizer = ud.distribute(model, optimizer)
    norms: list[float] = []
    step = optimizer.step

    def clipped() -> None:
        norms.append(ud.clip_grad_norm_(optimizer, LIMIT, ORDER).item())
        step()

    optimizer.step = clipped
    clip_torch._train(model, optimizer, case, ud.rank(), ud.size())
    optimizer.step = step
    if case.strategy == "zero=3":
        with gathered(model):
            return clip_torch._values(model), norms
    return clip_torch._values(model), norms


@pytest.mark.parallel
def test_every_strategy_clips_as_one_process_does(rank_pool: RankPoolFactory) -> None:
    pool = rank_pool(2)
    expected = pool.run(clip_torch.train_in_one_process, (CASES,))[0]
    unclipped = pool.run(
        clip_torch.train_in_one_process, ([Case(case.strategy, (), case.passes, case.sparse) for case in CASES],)
    )[0]
    found = pool.run(train, (CASES,))
    for number, case in enumerate(CASES):
        for rank in range(2):
            values, norms = found[rank][number]
            for name, value in expected[number].items():
                assert np.max(np.abs(values[name] - value)) <= 1e-12, (case, name, rank)
            assert norms == found[0][number][1], "equal on every rank"
            assert all(norm == 0 for norm in norms[:: case.passes]) == (case.passes > 1)
            assert norms[case.passes - 1] > LIMIT, "or nothing was clipped"
        assert any(np.any(unclipped[number][name] != expected[number][name]) for name in expected[number])


def train_in_16_bits(clips: bool) -> list[float]:
    """Return the change of a weight in each update: the gradient is always the same, and so is what is left of it."""
    with set_variables({"UNIDIST_STRATEGY": "zero=1,precision=bf16"}):
        ud.init()
        try:
            model: Any = torch.nn.Linear(1, 1, bias=False)
            torch.nn.init.zeros_(model.weight)
            model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))
            values = [0.0]
            for _ in range(3):
                optimizer.zero_grad()
                (model(torch.ones(1, 1)) * 8).sum().backward()
                if clips:
                    ud.clip_grad_norm_(optimizer, 2.0)
                optimizer.step()
                values.append(model.weight.item())
            return [before - after for before, after in itertools.pairwise(values)]
        finally:
            ud.shutdown()


@pytest.mark.parallel
def test_each_update_is_clipped_by_itself(rank_pool: RankPoolFactory) -> None:
    pool = rank_pool(2)
    assert pool.run(train_in_16_bits, (False,)) == [[8.0, 8.0, 8.0]] * 2
    assert pool.run(train_in_16_bits, (True,)) == [pytest.approx([2.0, 2.0, 2.0], rel=1e-2)] * 2


def use_sharded_gradients(strategy: str) -> list[str]:
    messages = []
    with set_variables({"UNIDIST_STRATEGY": strategy}):
        ud.init()
        try:
            model: Any = torch.nn.Linear(3, 2)
            model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
            for set_to_none in (True, False):
                model(torch.ones(1, 3)).sum().backward()
                assert model.weight.grad is not None
                for use in (
                    lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
                    lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
                    lambda: model.weight.grad.norm(),
                    lambda: model.weight.grad.mul_(2),
                ):
                    with pytest.raises(UsageError, match="clip_grad_norm_") as caught:
                        use()
                    messages.append(str(caught.value))
                optimizer.step()
                assert model.weight.grad is None
                model(torch.ones(1, 3)).sum().backward()
                optimizer.zero_grad(set_to_none=set_to_none)
        finally:
            ud.shutdown()
    return messages


@pytest.mark.parallel
def test_sharded_gradients_cannot_be_used_by_mistake(rank_pool: RankPoolFactory) -> None:
    for strategy in ("zero=1", "zero=3"):
        assert len(rank_pool(2).run(use_sharded_gradients, (strategy,))[1]) == 8


def test_plain_optimizers_and_bad_limits() -> None:
    model = torch.nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norm = ud.clip_grad_norm_(optimizer, 0.5, math.inf)
    assert norm.item() == 1.0
    assert model.weight.grad is not None
    assert model.weight.grad.abs().max().item() == pytest.approx(0.5)
    with pytest.raises(UsageError, match="above 0"):
        ud.clip_grad_norm_(optimizer, 0.0)
