"""PyTorch over the engine `mpi`: training like one process, and named operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mpi_pool import MpiPool

pytest.importorskip("torch", reason="the framework under test")

import torch

import unidist.torch as ud

pytestmark = pytest.mark.parallel

STEPS, BATCH, FEATURES, CLASSES = 5, 12, 6, 3


# In this order: a pool is started once. Three ranks show all that two do, but a pair of them.
SIZES = pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.soak)], scope="module")


def _data() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(STEPS, BATCH, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (STEPS, BATCH), generator=generator)


def _network() -> Any:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, CLASSES)).double()


def _alone() -> list[Any]:
    model = _network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in zip(*_data(), strict=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _train(*, exchange: bool = True) -> list[Any]:
    ud.init()
    try:
        assert ud.mpi_enabled()
        model = _network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if exchange:
            model, optimizer = ud.distribute(model, optimizer)
        rows = slice(ud.rank() * BATCH // ud.size(), (ud.rank() + 1) * BATCH // ud.size())
        for x, y in zip(*_data(), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]
    finally:
        ud.shutdown()


def _named() -> None:
    ud.init()
    try:
        rank, size = ud.rank(), ud.size()
        assert ud.mpi_built()
        assert ud.mpi_enabled()
        assert ud.mpi_threads_supported()
        names = [f"tensor {i}" for i in range(20)]
        tensors = {name: torch.full((1 + 1000 * i,), float(rank)) for i, name in enumerate(names)}
        order = names if rank % 2 else names[::-1]
        handles = {name: ud.allreduce_async_(tensors[name], name=name, op=ud.Sum) for name in order}
        # The script's own communicator is at work while the negotiator's thread is.
        total = torch.full((300_000,), 1.0)
        ud.world().allreduce(ud.buffer(total), ud.buffer(total)).wait()
        assert (total == size).all()
        for name in names:
            assert (ud.synchronize(handles[name]) == sum(range(size))).all(), name
        for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.float64):
            mean = ud.allreduce(torch.full((3,), 2 * rank, dtype=dtype), name=f"mean of {dtype}")
            assert mean.tolist() == [size - 1] * 3, dtype
        halves = ud.allreduce(torch.tensor([3, -5, 7]), op=ud.Sum, prescale_factor=0.5)
        assert halves.tolist() == [size, -2 * size, 3 * size]
        top = torch.full((size,), 60000 / size, dtype=torch.float16) * size
        assert torch.equal(ud.reducescatter(top, op=ud.Sum, prescale_factor=1 / size), top[:1])
        rows = torch.full((rank + 1, 2), rank)
        gathered = ud.allgather(rows, name="gather")
        assert gathered[:, 0].tolist() == [other for other in range(size) for _ in range(other + 1)]
        assert ud.broadcast(torch.tensor([rank]), root_rank=size - 1, name="cast").item() == size - 1
        assert ud.alltoall(torch.full((size,), rank), name="all").tolist() == list(range(size))
        if size > 1:
            assert ud.join() in range(size)
    finally:
        ud.shutdown()


@SIZES
def test_training_equals_one_process(mpi_pool: Callable[..., MpiPool], size: int) -> None:
    wanted, results = _alone(), mpi_pool(size).run(_train)
    for result in results:
        for found, other, expected in zip(result, results[0], wanted, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            assert torch.equal(found, other)


def test_without_the_exchange_the_ranks_differ(mpi_pool: Callable[..., MpiPool]) -> None:
    first, *others = mpi_pool(3).run(lambda: _train(exchange=False))
    assert all(not torch.equal(first[0], other[0]) for other in others)


@SIZES
def test_named_operations_over_mpi(mpi_pool: Callable[..., MpiPool], size: int) -> None:
    mpi_pool(size).run(_named)
