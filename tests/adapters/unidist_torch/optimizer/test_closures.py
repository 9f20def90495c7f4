"""`step(closure)` on several ranks: optimizers that evaluate it again, and loops that always pass one (Lightning)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _training import BATCH, CLASSES, FEATURES, STEPS, network, runtime, values

import unidist.torch as ud
from unidist.errors import ConfigurationError, UsageError
from unidist.jobs.pool.pool import RankPool
from unidist.runtime import context

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=5, line_search_fn="strong_wolfe")


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def batch(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's share of a batch."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (BATCH,), generator=generator)
    rows = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
    return x[rows], y[rows]


def step_on(model: Any, optimizer: Any, step: int, rank: int, size: int) -> float:
    """Step with a closure, as Lightning does; returns the loss that `step` returns."""
    x, y = batch(step, rank, size)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return float(optimizer.step(closure).detach())


def train(
    strategy: str, make: Callable[[Any], torch.optim.Optimizer], steps: int = STEPS
) -> tuple[list[torch.Tensor], list[float]]:
    """Train on this rank's share; returns parameters and losses."""
    with runtime():
        model: Any = network()
        model, optimizer = ud.distribute(model, make(model.parameters()), strategy)
        data = context.current().axis("data")
        losses = [step_on(model, optimizer, step, data.rank, data.size) for step in range(steps)]
        return [value.clone() for value in model.state_dict().values()], losses


def test_lbfgs_under_data_equals_one_process(pool: Pool) -> None:
    def alone() -> tuple[list[torch.Tensor], list[float]]:
        model = network()
        optimizer = lbfgs(model.parameters())
        losses = [step_on(model, optimizer, step, 0, 1) for step in range(3)]
        return values(model), losses

    ((expected, losses),) = pool(1).run(alone)
    for found, found_losses in pool(2).run(train, ("data", lbfgs, 3)):
        assert found_losses == pytest.approx(losses, rel=1e-9)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("strategy", ["data", "zero=1", "zero=2", "zero=3:shared=false"])
def test_a_closure_in_every_step_of_a_window(pool: Pool, strategy: str) -> None:
    def alone() -> list[torch.Tensor]:
        model = network()
        optimizer = adam(model.parameters())
        for first in range(0, STEPS, 2):
            optimizer.zero_grad()
            for step in (first, first + 1):
                x, y = batch(step, 0, 1)
                (torch.nn.functional.cross_entropy(model(x), y) / 2).backward()
            optimizer.step()
        return values(model)

    (expected,) = pool(1).run(alone)
    (first, losses), (second, _) = pool(2).run(train, (f"{strategy},accumulate=2", adam))
    assert all(losses)
    for found in (first, second):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("zero=2", "asks for a closure"),
        ("tensor=2", "tensor parallelism"),
        ("data,accumulate=2", "accumulate=2 takes one call"),
    ],
)
def test_where_lbfgs_cannot_be_right_it_is_refused(pool: Pool, strategy: str, reason: str) -> None:
    def on_rank() -> str:
        try:
            train(strategy, lbfgs)
        except (ConfigurationError, UsageError) as exc:
            return str(exc)
        return ""

    for message in pool(2).run(on_rank):
        assert reason in message
        assert "\n" not in message
