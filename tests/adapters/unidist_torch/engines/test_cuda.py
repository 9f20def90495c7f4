"""CUDA paths: gloo carrying device tensors, NCCL, and training on a device. Run wherever a GPU is present."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _training import alone, assert_close, data, loss_of, network, runtime, share, values

import unidist.torch as ud
from unidist.buffer import Buffer, DType
from unidist.errors import ConfigurationError, PeerLostError
from unidist.jobs.pool.pool import RankPool
from unidist.runtime.context import current
from unidist.settings import ranks_may_share

Pool = Callable[..., RankPool]
LARGEST = 4  # ranks of a pool
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parallel,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # type: ignore[arg-type]  # parameters of a module


def ranks_for(engine: str) -> int:
    """NCCL wants a GPU for each rank, even if that is one rank, unless ranks may share one, as those of gloo."""
    return min(torch.cuda.device_count(), LARGEST) if engine == "nccl" and not ranks_may_share() else 2


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


def device() -> torch.device:
    """Return a device that ranks over gloo may share."""
    return torch.device("cuda", ud.local_rank() % torch.cuda.device_count())


@pytest.mark.parametrize("engine", ["gloo", "nccl", "auto"])
def test_named_operations_on_device_tensors(pool: Pool, engine: str) -> None:
    def on_rank() -> None:
        with runtime():
            rank, size = ud.rank(), ud.size()
            stays = current().operations().moves("cuda")
            assert stays is (engine == "nccl" or (engine == "auto" and size <= torch.cuda.device_count()))
            tensor = torch.full((4,), float(rank), device=device())
            total = sum(range(size))
            assert torch.equal(ud.allreduce(tensor, op=ud.Sum).cpu(), torch.full((4,), float(total)))
            assert torch.equal(ud.allreduce(tensor).cpu(), torch.full((4,), total / size))
            scaled = ud.allreduce(tensor + 1, op=ud.Sum, prescale_factor=0.5, postscale_factor=4.0)
            assert torch.equal(scaled.cpu(), torch.full((4,), 2.0 * (total + size)))
            fused = [torch.full((n,), rank + n, device=device(), dtype=torch.int64) for n in range(1, 20)]
            for n, result in enumerate(ud.grouped_allreduce(fused, op=ud.Sum), 1):
                assert torch.equal(result.cpu(), torch.full((n,), total + n * size))
            gathered = ud.allgather(torch.full((rank + 1, 2), float(rank), device=device()))
            assert gathered.device.type == "cuda"
            assert gathered[:, 0].tolist() == [float(each) for each in range(size) for _ in range(each + 1)]
            rows, counts = ud.alltoall(torch.full((size, 3), float(rank), device=device()), splits=[1] * size)
            assert rows[:, 0].tolist() == [float(each) for each in range(size)]
            assert counts.tolist() == [1] * size
            own = ud.reducescatter(torch.ones(size, 2, device=device()), op=ud.Sum)
            assert own.tolist() == [[float(size)] * 2]
            ud.allreduce_(tensor, op=ud.Max)
            assert torch.equal(tensor.cpu(), torch.full((4,), float(size - 1)))
            assert torch.equal(ud.broadcast_(tensor.fill_(rank), size - 1).cpu(), torch.full((4,), float(size - 1)))

    pool(ranks_for(engine), engine).run(on_rank)


@pytest.mark.parametrize("kind", ["communicator", "named"])
def test_operations_wait_for_the_stream_that_made_the_tensor_and_hold_up_the_one_that_reads_it(
    pool: Pool, kind: str
) -> None:
    def on_rank() -> None:
        with runtime():
            world, size = current().communicator("cuda"), ud.size()
            for _ in range(10):
                with torch.cuda.stream(torch.cuda.Stream(ud.device())):
                    tensor = torch.zeros(1 << 20, device=ud.device())
                    torch.cuda._sleep(20_000_000)  # some milliseconds: an operation that does not wait reads zeros
                    tensor.fill_(1.0)
                    if kind == "named":
                        ud.allreduce_(tensor, op=ud.Sum)
                    else:
                        world.allreduce(ud.buffer(tensor), ud.buffer(tensor)).wait()
                    tensor += 1
                    copies = [torch.full_like(tensor, 9.0) for _ in range(4)]  # would land in memory given back early
                    assert tensor.eq(size + 1.0).all()
                    del copies

    pool(ranks_for("nccl"), "nccl").run(on_rank)


def test_each_rank_has_its_own_device(pool: Pool) -> None:
    def on_rank() -> tuple[str, int]:
        with runtime():
            current().communicator("cuda")
            return str(ud.device()), torch.cuda.current_device()

    num_proc = torch.cuda.device_count()
    assert pool(num_proc, "nccl").run(on_rank) == [(f"cuda:{rank}", rank) for rank in range(num_proc)]


def test_more_ranks_than_devices_are_an_error(pool: Pool) -> None:
    def on_rank() -> str:
        try:
            with runtime():
                return "connected"
        except ConfigurationError as exc:
            return str(exc)

    if ranks_may_share() or torch.cuda.device_count() >= LARGEST:
        pytest.skip("as many ranks as the pool has can be connected")
    num_proc = torch.cuda.device_count() + 1
    for message in pool(num_proc, "nccl").run(on_rank):
        assert f"its host runs {num_proc} ranks: there is no device for each" in message


@pytest.mark.skipif(
    torch.cuda.device_count() < 2 and not ranks_may_share(),
    reason="needs two CUDA devices, or an NCCL that connects two ranks on one (NCCL_MULTI_RANK_GPU_ENABLE=1)",
)
def test_an_abort_ends_an_operation_that_a_peer_never_enters(pool: Pool) -> None:
    def on_rank() -> float:
        with runtime():
            world: Any = current().communicator("cuda")
            group = world.split(range(ud.size()))
            group._waits_on_host = True  # as in an elastic job
            seconds = 0.0
            if ud.rank() == 0:
                tensor = torch.ones(1 << 20, device=ud.device())
                timer = threading.Timer(0.5, group.abort, ["rank 1 is lost"])
                timer.start()
                began = time.monotonic()
                with pytest.raises(PeerLostError, match="rank 1 is lost"):
                    group.allreduce(ud.buffer(tensor), ud.buffer(tensor)).wait()
                seconds = time.monotonic() - began
                timer.join()
            else:
                time.sleep(1.0)
                group.abort("this rank is done")
            group.close()
            again = world.split(range(ud.size()))  # the device is free, and a new communicator works
            token = torch.ones(1, device=ud.device())
            again.allreduce(ud.buffer(token), ud.buffer(token)).wait()
            assert token.item() == ud.size()
            again.close()
            return seconds

    assert max(pool(2, "nccl").run(on_rank)) < 10
