"""CUDA paths: gloo carrying device tensors, NCCL, and training on a device. Run wherever a GPU is present."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from _training import alone, assert_close, data, loss_of, network, runtime, share, values

import unidist.torch as ud
from unidist.buffer import Buffer, DType
from unidist.jobs.pool.pool import RankPool
from unidist.runtime.context import current

Pool = Callable[..., RankPool]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parallel,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]  # parameters of a module


def ranks_for(engine: str) -> int:
    """NCCL wants a GPU per rank; gloo shares one."""
    return torch.cuda.device_count() if engine == "nccl" else 2


@pytest.mark.parametrize("engine", ["gloo", "nccl"])
def test_collectives_on_device_memory(pool: Pool, engine: str) -> None:
    def on_rank() -> None:
        with runtime():
            world = current().communicator("cuda")
            rank, size = world.rank, world.size
            device = torch.device("cuda", ud.local_rank() % torch.cuda.device_count())
            tensor = torch.full((1000,), float(rank + 1), device=device)
            world.allreduce(ud.buffer(tensor), ud.buffer(tensor), scale=0.5).wait()
            assert torch.equal(tensor.cpu(), torch.full((1000,), size * (size + 1) / 4))
            gathered = torch.empty(size * 3, device=device)
            world.allgather(ud.buffer(torch.full((3,), float(rank), device=device)), ud.buffer(gathered)).wait()
            assert torch.equal(gathered.cpu(), torch.arange(size).repeat_interleave(3).float())
            world.broadcast(ud.buffer(tensor.fill_(rank)), root=size - 1).wait()
            assert torch.equal(tensor.cpu(), torch.full((1000,), float(size - 1)))
            piece = torch.empty(2, device=device)
            world.reducescatter(ud.buffer(torch.ones(2 * size, device=device)), ud.buffer(piece)).wait()
            assert torch.equal(piece.cpu(), torch.full((2,), float(size)))
            world.barrier().wait()
            part = ud.buffer(tensor).slice(10, 5)
            assert part.dtype is DType.FLOAT32
            assert isinstance(part, Buffer)
            world.allreduce(part, part).wait()
            assert torch.equal(tensor.cpu()[9:16], torch.tensor([1.0, *([float(size)] * 5), 1.0]) * (size - 1))

    pool(ranks_for(engine), engine).run(on_rank)


@pytest.mark.parametrize("engine", ["gloo", "nccl", "auto"])
def test_training_on_a_device_equals_one_process(pool: Pool, engine: str) -> None:
    num_proc = ranks_for(engine)

    def on_rank() -> list[torch.Tensor]:
        with runtime():
            device = torch.device("cuda", ud.local_rank() % torch.cuda.device_count())
            model = network().to(device)
            model, optimizer = ud.distribute(model, sgd(model.parameters()))
            for x, y in zip(*data(), strict=True):
                optimizer.zero_grad()
                x, y = share(x, ud.rank(), ud.size()).to(device), share(y, ud.rank(), ud.size()).to(device)
                loss_of(model, x, y).backward()
                optimizer.step()
            return [value.cpu() for value in values(model)]

    for result in pool(num_proc, engine).run(on_rank):
        assert_close(result, alone(sgd), 1e-9)


@pytest.mark.parametrize("engine", ["gloo", "auto"])
def test_named_operations_on_device_tensors(pool: Pool, engine: str) -> None:
    def on_rank() -> None:
        with runtime():
            tensor = torch.full((4,), float(ud.rank()), device="cuda")
            assert torch.equal(ud.allreduce(tensor, op=ud.Sum).cpu(), torch.full((4,), 1.0))
            assert ud.allgather(tensor).device.type == "cuda"
            ud.allreduce_(tensor, op=ud.Max)
            assert torch.equal(tensor.cpu(), torch.ones(4))
            assert torch.equal(ud.broadcast_(tensor.fill_(ud.rank()), 1).cpu(), torch.ones(4))

    pool(2, engine).run(on_rank)
