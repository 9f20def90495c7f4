"""The communicator over NCCL, as far as no GPU is needed: gloo's group, and fakes, stand for NCCL's."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine nccl is PyTorch's")

import torch.distributed as dist  # noqa: E402 - after the check for torch

import unidist.torch as ud  # noqa: E402
from unidist.communicator import ReduceOp  # noqa: E402
from unidist.errors import ConfigurationError, PeerLostError, StalledError, UsageError  # noqa: E402
from unidist.jobs.pool.pool import RankPool  # noqa: E402
from unidist_torch.engines import engine, nccl  # noqa: E402
from unidist_torch.engines.store import SharedStore  # noqa: E402

Pool = Callable[..., RankPool]


class Work:
    """A work of torch on the device: complete when told so; waiting for it orders a stream, and returns at once."""

    def __init__(self) -> None:
        self.is_complete = threading.Event()
        self.num_waits = 0

    def wait(self, *limit: timedelta) -> None:
        assert not limit, "with a time limit torch waits on the host, a millisecond at a time"
        self.num_waits += 1

    def is_completed(self) -> bool:
        return self.is_complete.is_set()


class Group:
    """What `NcclCommunicator` calls of torch's group."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.calls: list[str] = []
        self.hangs = threading.Event()  # set: `shutdown` returns
        self.hangs.set()

    def allreduce(self, tensors: Any, options: Any = None) -> Work:
        self.works.append(Work())
        return self.works[-1]

    def abort(self) -> None:
        self.calls.append("abort")
        for work in self.works:
            work.is_complete.set()  # aborted kernels end

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        self.hangs.wait(20)


class OnFake(nccl.NcclCommunicator):
    def _make_group(self, store: Any) -> Any:
        self._device = torch.device("cpu")
        self.capabilities = SimpleNamespace(bucket_bytes=1)  # type: ignore[assignment]  # nobody asks
        return Group()


def communicator(*, waits_on_host: bool, timeout: float = 20.0) -> Any:
    store = SharedStore(dist.HashStore(), lambda: None)
    limit = timedelta(seconds=timeout)
    return OnFake(store, "world", 0, (0, 1), limit, device_index=0, waits_on_host=waits_on_host)


def start(comm: Any, scale: float = 1.0) -> tuple[Any, Any]:
    tensor = torch.ones(4)
    return tensor, comm.allreduce(ud.buffer(tensor), ud.buffer(tensor), scale=scale)


def test_a_wait_orders_the_stream_and_leaves_the_host_alone() -> None:
    comm = communicator(waits_on_host=False)
    tensor, work = start(comm, scale=0.25)
    assert not work.done()
    work.wait()  # though the operation is not complete
    assert comm._group.works[0].num_waits == 1
    assert tensor.tolist() == [0.5] * 4, "queued behind it"
    comm.close()


@pytest.mark.parametrize("how", ["elastic", "limit", "barrier"])
def test_a_wait_on_the_host_returns_when_the_operation_is_complete(how: str) -> None:
    comm = communicator(waits_on_host=how == "elastic")
    work = comm.barrier() if how == "barrier" else start(comm)[1]
    group = comm._group
    timer = threading.Timer(0.1, group.works[0].is_complete.set)
    timer.start()
    work.wait(timedelta(seconds=20) if how == "limit" else None)
    assert group.works[0].is_completed()
    assert group.works[0].num_waits == 1, "the stream is ordered, too"
    timer.join()
    comm.close()
    assert group.calls == ["shutdown"]


def test_an_abort_ends_a_wait_before_its_numbers_are_used() -> None:
    comm = communicator(waits_on_host=True)
    tensor, work = start(comm, scale=0.5)
    group = comm._group
    timer = threading.Timer(0.1, comm.abort, ["rank 1 is lost"])
    timer.start()
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        work.wait()
    timer.join()
    assert group.works[0].num_waits == 0
    assert tensor.tolist() == [1.0] * 4
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        start(comm)
    comm.close()
    assert group.calls == ["abort"], "and no orderly end, which would wait for peers"


def test_what_was_aborted_is_not_waited_for_by_the_stream_either() -> None:
    comm = communicator(waits_on_host=False)
    _, work = start(comm)
    comm.abort("rank 1 is lost")
    with pytest.raises(PeerLostError, match="rank 1 is lost"):
        work.wait()
    comm.close()


def test_an_operation_that_does_not_end_is_aborted_at_the_time_limit() -> None:
    comm = communicator(waits_on_host=True, timeout=0.2)
    _, work = start(comm)
    group = comm._group
    with pytest.raises(StalledError, match=r"allreduce of float32\[4\] on rank 0 .* within 0.2 s"):
        work.wait()
    comm.close()
    assert group.calls == ["abort"]


def test_an_end_that_peers_hold_up_does_not_hold_up_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_CLOSE_SEC", 0.1)
    comm = communicator(waits_on_host=False)
    group = comm._group
    group.hangs.clear()
    comm.close()
    assert group.calls == ["shutdown"]
    group.hangs.set()
    comm._ending.join(20)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        getattr(torch, "AcceleratorError", torch.OutOfMemoryError)("CUDA error: device-side assert triggered", 710),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("HIP error: out of memory"),
    ],
)
def test_an_error_of_the_device_is_no_loss_of_a_peer(error: RuntimeError) -> None:
    comm = communicator(waits_on_host=False)

    def fail(*args: Any) -> None:
        raise error

    comm._group.allreduce = fail
    with pytest.raises(type(error), match=str(error)) as raised:
        start(comm)
    assert raised.value is error
    comm.close()


def test_a_tensor_on_another_device_is_refused() -> None:
    comm = communicator(waits_on_host=False)
    comm._device = torch.device("cuda", 1)
    with pytest.raises(UsageError, match=r"a tensor on cpu on rank 0 .*, whose device is cuda:1: put .* on ud.device"):
        start(comm)
    comm.close()


class FakeNccl(Group):
    """Torch's class, of which the CPU's build has nothing."""

    seen: list[Any]
    Options = SimpleNamespace

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__()
        names = ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_DUMP_ON_TIMEOUT")
        self.seen.append(("made", rank, size, options._timeout, *(os.environ.get(name) for name in names)))

    def eager_connect_single_device(self, device: Any) -> None:
        self.seen.append(("connect", device))
        if self.seen[1][2] == 3:
            time.sleep(1.0)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(FakeNccl, "seen", found, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: found.append(("current", device)))
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    return found


def connect(members: tuple[int, ...], timeout: timedelta, *, waits_on_host: bool) -> Any:
    store = SharedStore(dist.HashStore(), lambda: None)
    return nccl.NcclCommunicator(store, "world", 0, members, timeout, device_index=1, waits_on_host=waits_on_host)


@pytest.mark.parametrize("waits_on_host", [False, True])
def test_a_group_is_made_on_its_device_and_connected_at_once(seen: list[Any], waits_on_host: bool) -> None:
    device, timeout = torch.device("cuda", 1), timedelta(seconds=20)
    comm = connect((0, 1), timeout, waits_on_host=waits_on_host)
    made = ("made", 0, 2, timeout, "1" if waits_on_host else None, "1")  # the user's own variable stays
    assert seen == [("current", device), made, ("current", device), ("connect", device)]
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    comm.close()


def test_ranks_that_do_not_come_are_an_error_and_no_hang(seen: list[Any]) -> None:
    with pytest.raises(StalledError, match=r"connect on rank 0 \(nccl, ranks 0-2\)"):
        connect((0, 1, 2), timedelta(seconds=0.2), waits_on_host=False)


def test_two_ranks_on_one_device_are_an_error() -> None:
    shared = ["GPU a", "GPU b", "GPU a"]
    nccl.check_devices(["GPU a", "GPU b", "GPU c"], members=range(3), may_share=False, version=(2, 28, 9))
    nccl.check_devices(shared, members=range(3), may_share=True, version=(2, 30, 7))
    with pytest.raises(ConfigurationError, match=r"ranks 0, 2 use GPU a.*--engine gloo"):
        nccl.check_devices(shared, members=range(3), may_share=False, version=(2, 30, 7))
    with pytest.raises(ConfigurationError, match=r"ranks 0, 2 use GPU a: that needs NCCL 2.30 .* this is 2.28.9"):
        nccl.check_devices(shared, members=range(3), may_share=True, version=(2, 28, 9))


def test_sockets_use_the_interface_of_the_hosts_address() -> None:
    interfaces = {"lo": ["127.0.0.1", "::1"], "eth1": ["02:00:00:00:00:01", "10.0.0.7", "fe80::1%eth1"]}
    assert nccl.socket_variables("10.0.0.7", interfaces) == {
        "NCCL_SOCKET_IFNAME": "=eth1",
        "NCCL_SOCKET_FAMILY": "AF_INET",
    }
    assert nccl.socket_variables("fe80::1", interfaces)["NCCL_SOCKET_FAMILY"] == "AF_INET6"
    assert nccl.socket_variables("10.0.0.8", interfaces) == {}


class OnGloo(nccl.NcclCommunicator):
    averages = False

    def _make_group(self, store: Any) -> Any:
        self._device = torch.device("cpu")
        self.capabilities = SimpleNamespace(bucket_bytes=1)  # type: ignore[assignment]  # nobody asks
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # public in practice, not annotated
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = self.timeout
        return dist.ProcessGroupGloo(store, self.rank, self.size, options)


@pytest.mark.parallel
@pytest.mark.parametrize("waits_on_host", [False, True])
def test_every_collective_has_its_result(pool: Pool, tmp_path_factory: Any, waits_on_host: bool) -> None:
    path = str(tmp_path_factory.mktemp("store") / "store")

    def on_rank(rank: int) -> None:
        size = 2
        store = SharedStore(dist.FileStore(path, size), lambda: None)
        world = OnGloo(store, "world", rank, (0, 1), timedelta(seconds=30), device_index=0, waits_on_host=waits_on_host)
        part = world.split([0, 1])
        assert isinstance(part, OnGloo)
        assert part._waits_on_host is waits_on_host
        for comm in (world, part):
            for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.uint64):
                ranks = torch.tensor([rank, 1, 0, rank]).to(dtype)
                total = torch.empty(4, dtype=dtype)
                comm.allreduce(ud.buffer(ranks), ud.buffer(total), op=ReduceOp.MAX).wait()
                assert total.tolist() == torch.tensor([1, 1, 0, 1]).to(dtype).tolist()
                if not waits_on_host:  # gloo's work of this operation is complete in `wait` alone
                    own = torch.empty(2, dtype=dtype)
                    comm.reducescatter(ud.buffer(ranks), ud.buffer(own), op=ReduceOp.MAX).wait()
                    assert own.tolist() == total[2 * rank : 2 * rank + 2].tolist()
            if not waits_on_host:
                mean = torch.empty(2)
                comm.reducescatter(ud.buffer(torch.arange(4.0) * (rank + 1)), ud.buffer(mean), scale=0.5).wait()
                assert mean.tolist() == ([0.0, 1.5] if rank == 0 else [3.0, 4.5])
            uneven = torch.empty(1 + 2 * rank)
            counts = [1, 3]
            comm.reducescatter(ud.buffer(torch.ones(4)), ud.buffer(uneven), counts=counts).wait()
            assert uneven.tolist() == [2.0] * (1 + 2 * rank)
            gathered = torch.empty(4)
            comm.allgather(
                ud.buffer(torch.full((counts[rank],), float(rank))), ud.buffer(gathered), counts=counts
            ).wait()
            assert gathered.tolist() == [0.0, 1.0, 1.0, 1.0]
            pair = torch.empty(2, dtype=torch.complex64)
            comm.allgather(ud.buffer(torch.tensor([rank + 1j])), ud.buffer(pair)).wait()
            assert pair.tolist() == [1j, 1 + 1j]
            token = torch.tensor([float(rank)])
            comm.broadcast(ud.buffer(token), root=1).wait()
            assert token.item() == 1.0
            if not waits_on_host:
                message = torch.tensor([3.0 + rank])
                (comm.send(ud.buffer(message), to=1) if rank == 0 else comm.recv(ud.buffer(message), source=0)).wait()
                assert message.item() == 3.0
            comm.barrier().wait()
        part.close()
        world.close()

    pool(2, "shm").run(on_rank, per_rank_args=[(0,), (1,)])


def test_a_pytorch_that_is_newer_than_all_known_ones_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for version in ("2.6.0", "2.14.1+cu130", "2.15.0"):
        engine._warn_of_torch(version)
    assert not caplog.records
    engine._warn_of_torch("2.99.0a0+git1")
    assert "engine nccl works with torch >= 2.6, < 2.16, and 2.99.0a0+git1 is installed" in caplog.text


def test_a_pytorch_without_the_class_that_the_engine_drives_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=None, abort=None), raising=False)
    found = engine.NcclEngine().availability()
    assert not found.usable
    assert "ProcessGroupNCCL with eager_connect_single_device, shutdown; install torch >= 2.6, < 2.16" in found.reason
