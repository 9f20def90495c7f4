"""Objects, parameters and optimizer state from one rank to all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _training import network, runtime, values

import unidist.torch as ud
from unidist.errors import UsageError
from unidist.jobs.pool.pool import RankPool
from unidist.settings.environment import set_variables
from unidist_expert_parallel.torch import MixtureOfExperts
from unidist_torch.operations.functions import give_optimizer_state

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel


def test_objects_of_any_size(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            rank, size = ud.rank(), ud.size()
            assert ud.broadcast_object({"of": rank, "many": list(range(50_000))}, root_rank=1)["of"] == 1
            assert ud.broadcast_object(None if rank else (lambda x: x + 1))(2) == 3
            assert ud.allgather_object("x" * rank * 1000) == ["x" * r * 1000 for r in range(size)]

    pool(3).run(on_rank)


def test_broadcast_parameters_of_named_pairs_and_state_dicts(pool: Pool) -> None:
    def on_rank() -> list[torch.Tensor]:
        with runtime():
            torch.manual_seed(ud.rank())
            model, other = torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)
            other.running_mean.fill_(ud.rank())
            ud.broadcast_parameters(model.named_parameters(), root_rank=1)
            ud.broadcast_parameters(other.state_dict(), root_rank=1)
            assert other.running_mean.sum() == 3
            return values(model)

    first, *others = pool(3).run(on_rank)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


STOCK = [
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "ASGD",
    "RMSprop",
    "Rprop",
    "Adafactor",
]


@pytest.mark.parametrize("name", STOCK)
def test_broadcast_optimizer_state(pool: Pool, name: str) -> None:
    def on_rank() -> tuple[dict[str, Any], list[torch.Tensor]]:
        with runtime():
            torch.manual_seed(0)
            model = network().float()
            optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01 * (1 + ud.rank()))
            before = values(model)
            if ud.rank() == 1:
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                with torch.no_grad():
                    for parameter, old in zip(model.parameters(), before, strict=True):
                        parameter.copy_(old)
            ud.broadcast_optimizer_state(optimizer, root_rank=1)
            assert all(torch.equal(a, b) for a, b in zip(values(model), before, strict=True))  # nothing was stepped
            # Horovod's scripts find zeros where there was neither state nor gradient; Adagrad always has a state.
            found = {None if each.grad is None else each.grad.unique().item() for each in model.parameters()}
            assert found == ({1.0} if ud.rank() == 1 else {None} if name == "Adagrad" else {0.0})
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
            optimizer.step()
            return optimizer.state_dict(), values(model)

    (first, after), (second, other_after) = pool(2).run(on_rank)
    assert first["param_groups"] == second["param_groups"]
    assert first["param_groups"][0]["lr"] == 0.02
    assert all(torch.equal(a, b) for a, b in zip(after, other_after, strict=True))


def test_the_state_of_lbfgs_is_that_of_the_root(pool: Pool) -> None:
    def on_rank() -> list[torch.Tensor]:
        with runtime():
            model = network()
            optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=2)

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = model(torch.ones(2, 6, dtype=torch.float64)).square().mean()
                loss.backward()
                return loss

            if ud.rank() == 1:
                for _ in range(3):
                    optimizer.step(closure)  # type: ignore[arg-type]  # torch says that it returns a float
            ud.broadcast_parameters(model.state_dict(), root_rank=1)
            with pytest.raises(ValueError, match="as in Horovod"):
                ud.broadcast_optimizer_state(optimizer, root_rank=1)
            give_optimizer_state(optimizer, root_rank=1)
            optimizer.step(closure)  # type: ignore[arg-type]
            return values(model)

    first, second = pool(2).run(on_rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one, whose state has other keys than torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner, self.steps, self.slow = optimizer, 0, [torch.zeros(2)]
        self.param_groups = optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        """Step the inner one, and count."""
        self.inner.step(closure)
        self.steps += 1
        self.slow = [torch.full((2,), float(self.steps))]

    def state_dict(self) -> dict[str, Any]:
        """Return both states."""
        return {"fast": self.inner.state_dict(), "slow": self.slow, "steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over both states."""
        self.inner.load_state_dict(state_dict["fast"])
        self.slow, self.steps = state_dict["slow"], state_dict["steps"]


class Warmup:
    """An object around an optimizer that has no state to give."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer


def test_the_state_of_an_optimizer_around_another_one_is_that_of_the_root(pool: Pool) -> None:
    def on_rank() -> dict[str, Any]:
        with runtime():
            model = network()
            optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1 * (1 + ud.rank()), momentum=0.9))
            for _ in range(ud.rank()):
                for parameter in model.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
            ud.broadcast_optimizer_state(optimizer, root_rank=1)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer.inner, 1 + ud.rank())
            ud.broadcast_optimizer_state(scheduler, root_rank=1)
            assert scheduler.step_size == 2
            return optimizer.state_dict()

    for state in pool(2).run(on_rank):
        assert state["steps"] == 1
        assert state["slow"][0].tolist() == [1.0, 1.0]
        assert state["fast"]["param_groups"][0]["lr"] == 0.2
        assert state["fast"]["state"][0]["momentum_buffer"].min() == 1.0


def test_an_object_without_a_state_is_refused_before_any_rank_waits(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            model = network()
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
            with pytest.raises(UsageError, match="Give the optimizer in its attribute 'inner'"):
                ud.broadcast_optimizer_state(Warmup(optimizer))  # type: ignore[arg-type]  # that is refused
            for other in (None, [optimizer], model):
                with pytest.raises(UsageError, match="an optimizer is expected"):
                    ud.broadcast_optimizer_state(other)  # type: ignore[arg-type]  # that is refused
            with pytest.raises(ValueError, match=r"use broadcast_optimizer_state\(optimizer\)"):
                ud.broadcast_parameters(optimizer.state_dict())

    pool(2).run(on_rank)


@pytest.mark.parametrize("strategy", ["tensor=2", "expert=2"])
def test_parts_of_a_divided_model_are_not_copied_over_others(pool: Pool, strategy: str) -> None:
    def on_rank() -> None:
        with set_variables({"UNIDIST_STRATEGY": strategy}), runtime():
            model: torch.nn.Module = network() if "tensor" in strategy else MixtureOfExperts(4, 4, hidden=4)
            model, optimizer = ud.distribute(model, torch.optim.Adam(model.parameters()))
            for parameters in (model.state_dict(), model.named_parameters(), list(model.parameters())):
                with pytest.raises(UsageError, match="one rank's part of a divided model over another"):
                    ud.broadcast_parameters(parameters)
            with pytest.raises(UsageError, match="all ranks have the values of rank 0 already"):
                ud.broadcast_optimizer_state(optimizer)
            ud.broadcast_parameters(network().state_dict())

    pool(2).run(on_rank)
