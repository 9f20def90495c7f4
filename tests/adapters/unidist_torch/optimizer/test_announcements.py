"""A rank that has run out of data and has joined takes part in the others' updates with zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _training import assert_close, loss_of, network, runtime, values
from torch import nn

import unidist.torch as ud
from unidist.jobs.pool.pool import RankPool
from unidist.runtime import context

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel

BATCHES = (2, 4, 3)
"""Of each rank."""


def batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(4, 6, generator=generator, dtype=torch.float64), torch.randint(3, (4,), generator=generator))
        for _ in range(BATCHES[rank])
    ]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def join() -> int:
    return context.current().join()


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.words = nn.Embedding(20, 6, sparse=True)
        self.head = nn.Linear(6, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words((x * 10).long().abs() % 20).mean(1))


def train(bind: Callable[[nn.Module], Any], make_model: Callable[[], nn.Module]) -> tuple[list[torch.Tensor], int]:
    """Train on as many batches as this rank has, then join; returns the parameters of before, and the last rank."""
    with runtime():
        model = make_model()
        optimizer = bind(model)
        for x, y in batches(ud.rank()):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        found = values(model)
        return found, join()


def by_hand(make_model: Callable[[], nn.Module]) -> list[list[torch.Tensor]]:
    """Return the parameters after each number of steps: the mean over three ranks, some of them with zeros."""
    model = make_model()
    optimizer = sgd(model.parameters())
    found = []
    for step in range(max(BATCHES)):
        optimizer.zero_grad()
        for rank in range(3):
            if step < BATCHES[rank]:
                (loss_of(model, *batches(rank)[step]) / 3).backward()
        optimizer.step()
        found.append(values(model))
    return found


BINDS: dict[str, Callable[[nn.Module], Any]] = {
    "distribute": lambda model: ud.distribute(model, sgd(model.parameters()))[1],
    "buckets on their way": lambda model: ud.distribute(model, sgd(model.parameters()), "data:bucket_mb=0.0001")[1],
    "DistributedOptimizer": lambda model: ud.DistributedOptimizer(sgd(model.parameters())),
    "sparse as dense": lambda model: ud.DistributedOptimizer(sgd(model.parameters()), sparse_as_dense=True),
    "predivided": lambda model: ud.DistributedOptimizer(sgd(model.parameters()), gradient_predivide_factor=2.0),
}


@pytest.mark.parametrize("name", BINDS)
@pytest.mark.parametrize("make_model", [network, Embedder])
def test_a_joined_rank_counts_as_zeros_until_all_have_joined(
    pool: Pool, name: str, make_model: Callable[[], nn.Module]
) -> None:
    wanted = by_hand(make_model)
    for rank, (found, last) in enumerate(pool(3).run(train, (BINDS[name], make_model))):
        assert_close(found, wanted[BATCHES[rank] - 1])
        assert last == 1


def test_two_optimizers_of_which_one_is_stepped_more_often(pool: Pool) -> None:
    def on_rank() -> tuple[float, float]:
        with runtime():
            first, second = (nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(2))
            optimizers = [ud.DistributedOptimizer(torch.optim.SGD([each], lr=1.0)) for each in (first, second)]
            for step in range(4 * (ud.rank() + 1)):
                weight, optimizer = ((first, second)[step % 4 == 3], optimizers[step % 4 == 3])
                optimizer.zero_grad()
                (-2 * weight).backward()
                optimizer.step()
            found = float(first), float(second)
            assert join() == 1
            return found

    assert pool(2).run(on_rank) == [(6.0, 2.0), (9.0, 3.0)]


def test_gradients_that_were_never_applied_do_not_count_after_join(pool: Pool) -> None:
    def on_rank() -> float:
        with runtime():
            weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
            optimizer = ud.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
            for _ in range(1 + ud.rank()):
                (-weight).backward()
                optimizer.step()
                optimizer.zero_grad()
            if ud.rank() == 0:
                weight.grad = torch.tensor(100.0, dtype=torch.float64)
            found = float(weight)
            join()
            assert weight.grad is None or ud.rank() == 1
            return found

    assert pool(2).run(on_rank) == [1.0, 1.5]


def test_an_accumulated_window_and_its_flush(pool: Pool) -> None:
    def on_rank() -> float:
        with runtime():
            model = nn.Linear(1, 1, bias=False).double()
            with torch.no_grad():
                model.weight.zero_()
            model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), "accumulate=2")
            for _ in range(2 if ud.rank() == 0 else 5):
                optimizer.zero_grad()
                (-model(torch.ones(1, dtype=torch.float64))).sum().backward()
                optimizer.step()
            if ud.rank() == 1:
                assert optimizer.flush()
            found = float(model.weight)
            assert join() == 1
            return found

    # Two full windows, of which rank 0 has one, and a short one of a single pass on rank 1.
    assert pool(2).run(on_rank) == [1.0, 1.0 + 0.5 + 1.0]


def test_more_buckets_than_the_engine_posts_without_waiting(pool: Pool) -> None:
    def on_rank() -> float:
        with runtime():
            model = nn.ParameterList([nn.Parameter(torch.zeros(16, dtype=torch.float64)) for _ in range(200)])
            _, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), "data:bucket_mb=0.00001")
            for _ in range(1 + ud.rank()):
                optimizer.zero_grad()
                sum(-each.sum() for each in model).backward()
                optimizer.step()
            found = float(sum(each.sum() for each in model))
            join()
            return found / (200 * 16)

    assert pool(2).run(on_rank) == [1.0, 1.5]


def test_a_closures_loss(pool: Pool) -> None:
    def on_rank() -> float:
        with runtime():
            weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
            losses, own = [], []

            class Watching(torch.optim.SGD):
                def step(self, closure: Callable[[], torch.Tensor]) -> torch.Tensor:
                    losses.append(float(closure()))
                    return super().step(lambda: loss_before)

            loss_before = torch.tensor(7.0)
            optimizer = ud.DistributedOptimizer(Watching([weight], lr=1.0))
            for _ in range(1 + ud.rank()):

                def closure() -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = 3.0 - weight
                    loss.backward()
                    return loss

                own.append(float(optimizer.step(closure)))
            join()
            assert own == [3.0, 2.0][: 1 + ud.rank()]  # the script gets that of its own rank, as in Horovod
            return losses[-1]

    assert pool(2).run(on_rank) == [3.0, (3.0 - 1.0) / 2]
