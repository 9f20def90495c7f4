"""Objects, parameters and optimizer state from one rank to all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _training import network, runtime, values

import unidist.torch as ud
from unidist.jobs.pool.pool import RankPool
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
