"""What `distribute` is given that it cannot take is named, with what to do."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _training import runtime
from torch import nn

import unidist.torch as ud
from unidist.errors import UsageError
from unidist.jobs.pool.pool import RankPool
from unidist.settings.environment import set_variables

Pool = Callable[..., RankPool]


class Wrapper:
    """Looks like an optimizer, and is none."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self) -> None:
        self.inner.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


NO_OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "wrapper": (
        lambda model: Wrapper(sgd(model)),
        "not Wrapper. It wraps one, in its attribute 'inner': give that one",
    ),
    "list": (lambda model: [sgd(model)], "not list. Pass one optimizer per call"),
    "class": (lambda model: torch.optim.SGD, "not the class SGD. Give an object"),
    "nothing": (lambda model: None, "not NoneType. Give an object of a class that derives from torch.optim.Optimizer"),
}


@pytest.mark.parametrize("case", NO_OPTIMIZERS)
@pytest.mark.parametrize(
    "call",
    [
        lambda model, optimizer: ud.distribute(model, optimizer),
        lambda model, optimizer: ud.TrainStep(model, optimizer, nn.functional.mse_loss),
        lambda model, optimizer: ud.DistributedOptimizer(optimizer),
    ],
    ids=["distribute", "TrainStep", "DistributedOptimizer"],
)
def test_what_is_no_optimizer_is_an_error(call: Callable[[Any, Any], Any], case: str) -> None:
    make, message = NO_OPTIMIZERS[case]
    model = nn.Linear(2, 2)
    with runtime(), pytest.raises(UsageError, match=re.escape(message)):
        call(model, make(model))


def test_what_is_no_model_is_an_error() -> None:
    model = nn.Linear(2, 2)
    with runtime(), pytest.raises(UsageError, match=r"a model of torch\.nn is expected, not SGD"):
        ud.distribute(sgd(model), model)  # type: ignore[arg-type]


def twice(strategy: str) -> tuple[str, str]:
    """Distribute a model with two optimizers; return the error of the second, and of two with other types."""
    with set_variables({"UNIDIST_STRATEGY": strategy}), runtime():
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 4))
        first, second = (sgd(part) for part in model)
        model, first = ud.distribute(model, first)
        try:
            model, second = ud.distribute(model, second)
        except UsageError as exc:
            return type(exc).__name__, str(exc)
        before = [each.detach().clone() for each in model.parameters()]
        model(torch.ones(2, 4)).sum().backward()
        for optimizer in (first, second):
            optimizer.step()
        moved = sum(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        return "moved", str(moved)


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("strategy", "kind", "message"),
    [
        ("data", "moved", "6"),
        ("precision=bf16", "moved", "6"),
        ("precision=fp16", "UsageError", "is distributed already, and precision takes one optimizer here"),
        ("zero=1,precision=bf16", "UsageError", "is distributed already, and precision takes one optimizer here"),
        ("tensor=2", "UsageError", "(Sequential), or a part of it, is distributed already, and with tensor"),
    ],
)
def test_a_second_optimizer_works_or_is_named(pool: Pool, strategy: str, kind: str, message: str) -> None:
    for found, text in pool(2).run(twice, (strategy,)):
        assert found == kind, text
        assert message in text


@pytest.mark.parametrize(("steps", "flush", "warns"), [(5, False, True), (5, True, False), (8, False, False)])
def test_a_run_shorter_than_its_window_warns(
    steps: int, flush: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), runtime():
        model = nn.Linear(2, 2)
        model, optimizer = ud.distribute(model, sgd(model), "accumulate=8")
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        if flush:
            optimizer.flush()
    assert ("accumulate=8: the run ends after 5 backward passes" in caplog.text) == warns
