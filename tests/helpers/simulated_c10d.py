"""`torch.distributed` on simulated devices, for PyTorch's own DDP and FSDP2. Each rank is a thread with its own world.

Operations on tensors of a device are those of `SimulatedNccl`. DDP's reducer is C++, which takes all tensors for the
host's: the buckets that it makes go to the device within `Machine.making_for_cpp`. It asks for the future of an
operation, and waits for it by itself; here the present stream waits when it asks.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from simulated_device import Machine
from simulated_nccl import SimulatedNccl
from torch._C import _distributed_c10d as c10d
from torch.futures import Future

_Base: Any = dist.ProcessGroup
_WorkBase: Any = dist.Work
_NAME = "simulated"
_WAIT_SEC = 60.0


class GroupWork(_WorkBase):
    """An operation of a group.

    Args:
        work: of `SimulatedNccl`; None: it is complete.
        result: its tensors.
    """

    def __init__(self, work: Any, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._work = work
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait."""
        if self._work is not None:
            self._work.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether it is complete."""
        return self._work is None or bool(self._work.is_completed())

    def synchronize(self) -> None:
        """Make the current stream wait."""
        self.wait()

    def get_future(self) -> Future[Any]:
        """Return the future; the current stream waits."""
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self._result)
        return future


class SimulatedGroup(_Base):
    """See the module."""

    _meetings: dict[tuple[str, int], tuple[dict[int, list[torch.Tensor]], threading.Barrier]]
    _lock = threading.Lock()

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._nccl = SimulatedNccl(store, rank, size, None)
        self._nccl.eager_connect_single_device(torch.device("cuda", rank))
        self._rank, self._size = rank, size
        self._numbers = itertools.count()
        self._group_name = ""

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        """Return the name."""
        return _NAME

    @property
    def group_name(self) -> str:
        """The name by which PyTorch finds the group."""
        return self._group_name

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    setGroupName = _set_group_name  # noqa: N815

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """See `ProcessGroup`."""
        tensor = tensors[0] if isinstance(tensors, list | tuple) else tensors
        if not tensor.is_cuda:
            return self._on_host([tensor], lambda given: _set_all(given, 0, sum(each[0].clone() for each in given)))
        return GroupWork(self._nccl.allreduce([tensor], opts or dist.AllreduceOptions()), [tensor])

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        """See `ProcessGroup`."""
        tensor = tensors[0] if isinstance(tensors, list | tuple) else tensors
        opts = opts or dist.BroadcastOptions()
        if not tensor.is_cuda:
            return self._on_host([tensor], lambda given: _set_all(given, 0, given[opts.rootRank][0].clone()))
        return GroupWork(self._nccl.broadcast([tensor], opts), [tensor])

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """See `ProcessGroup`."""
        if not inputs[0].is_cuda:

            def run(given: list[list[torch.Tensor]]) -> None:
                for listed in given:
                    for target, other in zip(listed[1:], given, strict=True):
                        target.copy_(other[0])

            return self._on_host([inputs[0], *outputs[0]], run)
        return GroupWork(self._nccl.allgather(outputs, inputs), list(outputs[0]))

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Any:
        """See `ProcessGroup`."""
        return GroupWork(self._nccl._allgather_base(output, own), [output])

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None) -> Any:
        """See `ProcessGroup`."""
        return GroupWork(self._nccl._reduce_scatter_base(output, whole, opts), [output])

    _reduce_scatter_base = reduce_scatter_single

    def barrier(self, opts: Any = None) -> Any:
        """See `ProcessGroup`."""
        return self._on_host([], lambda given: None)

    def _on_host(self, tensors: list[torch.Tensor], run: Callable[[list[list[torch.Tensor]]], None]) -> GroupWork:
        key = (self._nccl._name, next(self._numbers))
        with self._lock:
            given, barrier = self._meetings.setdefault(key, ({}, threading.Barrier(self._size)))
            given[self._rank] = tensors
        barrier.wait(_WAIT_SEC)
        if self._rank == 0:
            run([given[rank] for rank in sorted(given)])
        barrier.wait(_WAIT_SEC)
        return GroupWork(None, tensors)


def _set_all(given: list[list[torch.Tensor]], number: int, value: Any) -> None:
    for listed in given:
        listed[number].copy_(value)


@contextmanager
def torch_distributed(machine: Machine) -> Iterator[None]:
    """Give each thread a world of `torch.distributed`."""
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    isolate: Any = c10d._set_thread_isolation_mode
    with (
        mock.patch.object(dist.distributed_c10d, "_world", ThreadLocalWorld()),
        mock.patch.object(SimulatedNccl, "machine", machine, create=True),
        mock.patch.object(SimulatedNccl, "groups", {}, create=True),
        mock.patch.object(SimulatedGroup, "_meetings", {}, create=True),
        mock.patch.dict(dist.Backend._plugins),
        mock.patch.dict(dist.Backend.backend_capability),
        mock.patch.object(dist.Backend, "backend_list", list(dist.Backend.backend_list)),
    ):
        dist.Backend.register_backend(_NAME, SimulatedGroup, devices=["cpu", "cuda"])
        isolate(True)
        try:
            yield
        finally:
            isolate(False)


def run_torch_ranks(machine: Machine, function: Callable[[int], Any], size: int = 2) -> list[Any]:
    """Return what a function returns on each rank of a world of `torch.distributed`; each is a thread."""
    store = dist.HashStore()
    found: dict[int, Any] = {}
    failed: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            with machine.computing():
                torch.cuda.set_device(rank)
                dist.init_process_group(_NAME, store=store, rank=rank, world_size=size)
                found[rank] = function(rank)
                dist.destroy_process_group()
        except BaseException as exc:
            failed.append(exc)

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _WAIT_SEC)
    if failed:
        raise failed[0]
    return [found[rank] for rank in range(size)]
