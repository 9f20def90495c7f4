"""An optimizer that was released lets another one take its model; closures that return nothing; clipping by value."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _training import BATCH, CLASSES, FEATURES, network, runtime

import unidist.torch as ud
from unidist.errors import UsageError
from unidist.jobs.pool.pool import RankPool

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel

LIMIT = 0.02


def share(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (BATCH,), generator=generator)
    return x[ud.rank() :: ud.size()], y[ud.rank() :: ud.size()]


def passes(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor, clips: bool) -> None:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    if clips:
        ud.clip_grad_value_(optimizer, LIMIT)


def two_optimizers(strategy: str, *, clips: bool = False) -> list[torch.Tensor]:
    """Train by one optimizer, then by another, with closures that return nothing."""
    with runtime():
        model: Any = network()
        for first, make in ((0, torch.optim.AdamW), (3, torch.optim.Adagrad)):
            optimizer: Any = make(model.parameters(), lr=0.05)
            model, optimizer = ud.distribute(model, optimizer, strategy)
            for step in range(first, first + 3):
                x, y = share(step)

                assert optimizer.step(functools.partial(passes, model, optimizer, x, y, clips)) is None
            optimizer.release()
            with pytest.raises(UsageError, match="this optimizer has let go of its parameters"):
                optimizer.step()
        return [value.clone() for value in model.state_dict().values()]


def alone(*, clips: bool = False) -> list[torch.Tensor]:
    model: Any = network()
    for first, make in ((0, torch.optim.AdamW), (3, torch.optim.Adagrad)):
        optimizer: Any = make(model.parameters(), lr=0.05)
        for step in range(first, first + 3):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
            y = torch.randint(CLASSES, (BATCH,), generator=generator)
            torch.nn.functional.cross_entropy(model(x), y).backward()
            if clips:
                torch.nn.utils.clip_grad_value_(model.parameters(), LIMIT)
            optimizer.step()
    return [value.clone() for value in model.state_dict().values()]


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("strategy", ["data", "zero=1", "zero=2"])
def test_another_optimizer_goes_on_with_the_model(strategy: str, clips: bool, pool: Pool) -> None:
    expected = pool(2).run(alone, kwargs={"clips": clips})[0]
    for found in pool(2).run(two_optimizers, (strategy,), {"clips": clips}):
        assert distance(found, expected) < 1e-12


def test_clipping_by_value_matters_here(pool: Pool) -> None:
    clipped, plain = (pool(2).run(alone, kwargs={"clips": clips})[0] for clips in (True, False))
    assert distance(clipped, plain) > 1e-3


def test_a_limit_of_zero_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(UsageError, match="clip_value=0: give a number above 0"):
        ud.clip_grad_value_(optimizer, 0)
