"""The public operations on tensors, on every engine."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _training import runtime

import unidist.torch as ud
from unidist.errors import MismatchError, NotInitializedError, StalledError, UsageError
from unidist.jobs.pool.pool import RankPool
from unidist.runtime import context
from unidist.settings.environment import set_variables
from unidist_torch.memory import DTYPES

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel
has_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed; unidist build horovod"
)


ENGINES = [
    *("single-1", "shm-3", "gloo-2", pytest.param("horovod-2", marks=has_horovod)),
    *(pytest.param(name, marks=pytest.mark.soak) for name in ("shm-2", "shm-4")),
]


@pytest.fixture(params=ENGINES)
def ranks(request: pytest.FixtureRequest, pool: Pool) -> RankPool:
    engine, size = request.param.split("-")
    return pool(int(size), engine)


def test_allreduce_of_every_dtype_and_reduction(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            size = ud.size()
            for dtype in DTYPES:
                for shape in ((), (0,), (3, 5), (2000,)):
                    inputs = [
                        (torch.arange(1, 1 + max(1, torch.Size(shape).numel())) % 3 + r).to(dtype) for r in range(size)
                    ]
                    inputs = [x[: torch.Size(shape).numel()].reshape(shape) for x in inputs]
                    ops = (
                        [(ud.Sum, torch.sum)]
                        if dtype.is_complex
                        else [(ud.Sum, torch.sum), (ud.Min, torch.amin), (ud.Max, torch.amax)]
                    )
                    for op, function in ops:
                        wide = (
                            torch.bool
                            if dtype is torch.bool
                            else torch.complex128
                            if dtype.is_complex
                            else torch.float64
                        )
                        stacked = torch.stack([x.to(torch.int64 if wide is torch.bool else wide) for x in inputs])
                        wanted = function(stacked, dim=0).to(dtype)
                        before = inputs[ud.rank()].clone()
                        found = ud.allreduce(inputs[ud.rank()], op=op, name=f"{dtype}{shape}{op}")
                        assert found.shape == before.shape
                        assert torch.equal(found, wanted), (dtype, shape, op, found, wanted)
                        assert torch.equal(inputs[ud.rank()], before)

    ranks.run(on_rank)


def test_average_is_the_default_and_exact_on_integers(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            assert ud.allreduce(torch.tensor([1.0 * ud.rank()])).item() == pytest.approx((ud.size() - 1) / 2)
            assert torch.equal(ud.allreduce(torch.full((50,), 49)), torch.full((50,), 49))
            assert torch.equal(ud.allreduce(torch.tensor([7]), average=False), torch.tensor([7 * ud.size()]))
            scaled = ud.allreduce(torch.tensor([2.0]), op=ud.Sum, prescale_factor=0.5, postscale_factor=3.0)
            assert scaled.item() == pytest.approx(3.0 * ud.size())

    ranks.run(on_rank)


def test_in_place_and_non_contiguous_tensors(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            tensor = torch.zeros(4, 6)
            column = tensor[:, 2]
            column += ud.rank() + 1
            result = ud.allreduce_(column, op=ud.Sum)
            assert result is column
            total = ud.size() * (ud.size() + 1) / 2
            assert torch.equal(tensor[:, 2], torch.full((4,), total))
            assert tensor.sum() == 4 * total
            transposed = torch.arange(6.0).reshape(2, 3).t()
            assert torch.equal(ud.allreduce(transposed), transposed)
            engine = ud.empty((3, 4), torch.float64)
            assert engine.sum() == 0
            ud.allreduce_(engine.fill_(ud.rank()), op=ud.Sum)
            assert torch.equal(engine, torch.full((3, 4), sum(range(ud.size())), dtype=torch.float64))
            target = torch.zeros(5, 2).t()
            assert torch.equal(ud.broadcast_(target.fill_(ud.rank()), 0), torch.zeros(2, 5))

    ranks.run(on_rank)


def test_allgather_of_uneven_rows(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            rows = ud.rank() * 2
            gathered = ud.allgather(torch.full((rows, 3), ud.rank(), dtype=torch.int16))
            wanted = torch.cat([torch.full((2 * r, 3), r, dtype=torch.int16) for r in range(ud.size())])
            assert torch.equal(gathered, wanted)
            assert torch.equal(ud.allgather(torch.tensor(ud.rank())), torch.arange(ud.size()))

    ranks.run(on_rank)


def test_broadcast_from_every_root(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            for root in range(ud.size()):
                mine = torch.tensor([ud.rank(), 5])
                assert torch.equal(ud.broadcast(mine, root), torch.tensor([root, 5]))
                assert mine[0] == ud.rank()

    ranks.run(on_rank)


def test_reducescatter_gives_the_first_ranks_one_row_more(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            rows = ud.size() + 1
            tensor = torch.arange(rows * 2.0).reshape(rows, 2)
            shares = torch.tensor_split(tensor, ud.size())
            assert torch.allclose(ud.reducescatter(tensor), shares[ud.rank()])
            assert torch.allclose(ud.reducescatter(tensor, op=ud.Sum), shares[ud.rank()] * ud.size())

    ranks.run(on_rank)


def test_alltoall_with_and_without_splits(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            rank, size = ud.rank(), ud.size()
            even = ud.alltoall(torch.full((size, 2), rank))
            assert torch.equal(even, torch.arange(size)[:, None].expand(size, 2))
            splits = [rank + to for to in range(size)]
            received, counts = ud.alltoall(torch.full((sum(splits),), rank), splits=splits)
            assert counts.tolist() == [sender + rank for sender in range(size)]
            assert torch.equal(received, torch.repeat_interleave(torch.arange(size), counts.long()))

    ranks.run(on_rank)


def test_send_and_recv(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            if ud.size() == 1:
                return
            following, previous = (ud.rank() + 1) % ud.size(), (ud.rank() - 1) % ud.size()
            first, second = torch.full((3,), ud.rank()), torch.full((100_000,), ud.rank())
            if ud.rank() == 0:
                ud.send(first, following)
                ud.send(second, following)
            assert torch.equal(ud.recv(torch.empty_like(first), previous), torch.full_like(first, previous))
            assert torch.equal(ud.recv(torch.empty_like(second), previous), torch.full_like(second, previous))
            if ud.rank() != 0:
                ud.send(first, following)
                ud.send(second, following)

    ranks.run(on_rank)


def test_names_match_in_any_order_asynchronously(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            names = [f"tensor {i}" for i in range(20)]
            order = names[ud.rank() :] + names[: ud.rank()]
            tensors = {name: torch.full((10 + i,), float(i)) for i, name in enumerate(names)}
            handles = {name: ud.allreduce_async(tensors[name], name=name, op=ud.Sum) for name in order}
            for name in reversed(names):
                assert torch.equal(ud.synchronize(handles[name]), tensors[name] * ud.size())

    ranks.run(on_rank)


def test_a_handle_is_not_done_before_every_rank_has_come(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            if ud.size() == 1:
                return
            handle = None
            if ud.rank() == 0:
                handle = ud.allreduce_async(torch.ones(3), name="late")
                assert not ud.poll(handle)
            ud.world().barrier().wait()
            if handle is None:
                handle = ud.allreduce_async(torch.ones(3), name="late")
            deadline = time.monotonic() + 60
            while not ud.poll(handle):
                assert time.monotonic() < deadline
                time.sleep(0.001)
            assert torch.equal(ud.synchronize(handle), torch.ones(3))

    ranks.run(on_rank)


def test_differing_calls_raise_everywhere_and_the_runtime_stays_usable(ranks: RankPool) -> None:
    def on_rank() -> list[str]:
        with runtime():
            if ud.size() == 1:
                return []
            odd = ud.rank() == 1
            wrong = {
                "shape": lambda: ud.allreduce(torch.ones(3 + odd), name="shape"),
                "dtype": lambda: ud.allreduce(
                    torch.ones(3, dtype=torch.float64 if odd else torch.float32), name="dtype"
                ),
                "op": lambda: ud.allreduce(torch.ones(3), name="op", op=ud.Min if odd else ud.Max),
                "root": lambda: ud.broadcast(torch.ones(3), int(odd), name="root"),
                "kind": lambda: (
                    ud.allgather(torch.ones(3), name="kind") if odd else ud.allreduce(torch.ones(3), name="kind")
                ),
                "columns": lambda: ud.allgather(torch.ones(2, 3 + odd), name="columns"),
            }
            if not ud.world().capabilities.detects_mismatch and context.current().engine.spec.name == "horovod":
                del wrong["kind"]  # Horovod's names are per kind: to it these are two operations that wait
            messages = []
            for name, call in wrong.items():
                with pytest.raises(MismatchError) as caught:
                    call()
                messages.append(str(caught.value))
                assert torch.equal(ud.allreduce(torch.ones(2), name=f"after {name}"), torch.ones(2))
            return messages

    for messages in ranks.run(on_rank):
        for message in messages:
            assert "rank" in message


def test_operations_before_init_say_what_to_do(pool: Pool) -> None:
    def on_rank() -> None:
        for call in (ud.rank, ud.size, ud.barrier, lambda: ud.allreduce(torch.ones(1)), lambda: ud.empty(3), ud.world):
            with pytest.raises(NotInitializedError, match=r"call init\(\) first"):
                call()
        assert not ud.is_initialized()
        with runtime():
            assert ud.is_initialized()
            ud.init()  # a second init does nothing
            assert ud.size() == 2
        ud.shutdown()

    pool(2, "shm").run(on_rank)


def test_bad_arguments_are_refused(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            with pytest.raises(UsageError, match="0 to 1"):
                ud.broadcast(torch.ones(1), 7)
            with pytest.raises(ValueError, match="not both"):
                ud.allreduce(torch.ones(1), average=True, op=ud.Sum)
            with pytest.raises(UsageError, match="do not divide"):
                ud.alltoall(torch.ones(3))
            with pytest.raises(UsageError, match="scalar"):
                ud.reducescatter(torch.tensor(1.0))
            ud.barrier()

    pool(2, "shm").run(on_rank)


def test_a_rank_that_never_comes_ends_in_an_error_that_names_it(pool: Pool, tmp_path: Path) -> None:
    stalled = tmp_path / "stalled"

    def on_rank() -> str:
        message = ""
        with set_variables({"UNIDIST_TIMEOUT_SEC": "2"}), runtime():
            if ud.rank() == 0:
                with pytest.raises(StalledError) as caught:
                    ud.allreduce(torch.ones(3), name="lonely")
                message = str(caught.value)
                stalled.touch()
            else:
                deadline = time.monotonic() + 60
                while not stalled.exists():  # alive, but elsewhere
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
        return message

    message = pool(2, "shm").run(on_rank)[0]
    assert "lonely" in message
    assert "1" in message


def test_the_world_communicator_takes_buffers(ranks: RankPool) -> None:
    def on_rank() -> None:
        with runtime():
            tensor = torch.ones(10)
            ud.world().allreduce(ud.buffer(tensor), ud.buffer(tensor)).wait()
            assert torch.equal(tensor, torch.full((10,), float(ud.size())))

    ranks.run(on_rank)


def test_engine_memory_outlives_the_runtime(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            tensor = ud.empty(1000)
            ud.allreduce_(tensor.fill_(1.0), op=ud.Sum)
        assert tensor.sum() == 2000
        tensor.add_(1)
        with runtime():
            assert ud.allreduce(tensor).sum() == 3000

    pool(2, "shm").run(on_rank)


def test_the_scripts_own_process_group_lives_beside_ours() -> None:
    def on_rank() -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        for engine in ("shm", "gloo"):
            with set_variables({"UNIDIST_ENGINE": engine}), runtime():
                tensor = torch.ones(3)
                dist.all_reduce(tensor)
                assert torch.equal(ud.allreduce(tensor), torch.full((3,), 2.0))
        dist.destroy_process_group()

    with RankPool(2) as own:
        own.run(on_rank)
