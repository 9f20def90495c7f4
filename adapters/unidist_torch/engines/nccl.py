"""NCCL as a communicator. Never run on a GPU so far.

How work is ordered. `ProcessGroupNCCL` runs each operation on its own stream, which first waits for the current
stream of the thread that issues it: so whatever was queued there before is an operation's input. `Work.wait` makes the
current stream of the thread that waits for it wait in turn, and returns at once: kernels that are queued afterwards
see the result. Until then torch keeps the tensors, so that the caching allocator gives their memory to nobody.

How it fails. A kernel of NCCL that waits for a lost peer occupies the device until its communicator is aborted, and
ends then with numbers that mean nothing.

- In a job that ends with its first rank, nobody has to see them: the launcher ends the others. torch's watchdog ends a
  process whose operation takes longer than the timeout.
- In an elastic job (`waits_on_host`) the process goes on. So every wait is one of the host, which sees an abort, an
  error of NCCL, and the time limit, and raises before any number is used. There is no watchdog: it would end the
  process a minute after the loss that it had noticed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from typing_extensions import override

from unidist.buffer import Buffer, DType
from unidist.communicator import Capabilities, MessageOrder, ReduceOp, Work
from unidist.errors import ConfigurationError, UsageError
from unidist.negotiation import RunsOnDevice
from unidist.settings import set_variables
from unidist_torch.engines.carriers import is_native
from unidist_torch.engines.process_group import ProcessGroupCommunicator
from unidist_torch.engines.store import SharedStore
from unidist_torch.memory import TORCH_DTYPES, buffer_of, tensor_of

_log = logging.getLogger("unidist.engine")

_SHARES_DEVICES = (2, 30)
"""The first version of NCCL that connects several ranks on one device."""

_POLL_SEC = 50e-6
_CLOSE_SEC = 2.0
"""What a group's end may take; then it goes on in its thread, without anybody who waits."""

_VARIABLES = {
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else a thread asks the store every second, which rank 0 may have closed
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",  # callers know: `MessageOrder.MATCHED`
}
_VARIABLES_ON_HOST = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # no watchdog
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}

_environment = threading.Lock()
"""Held while variables of the process are changed to make a group: several threads make groups."""


class NcclCommunicator(ProcessGroupCommunicator, RunsOnDevice):
    """NCCL between GPUs, one for each rank.

    It runs the operations of a group one after the other, a send until its receiver takes it. So the order of messages
    counts (`MessageOrder.MATCHED`).

    Args:
        waits_on_host: every wait returns when the operation is complete, and the process survives the loss of a peer.
            Else a wait orders the current stream, as torch's do.
        parent: the group that this one is split from, and the number of this part among the others; None: it is made
            from scratch.
        **others: of `ProcessGroupCommunicator`.
    """

    backend = "nccl"
    averages = True

    def __init__(
        self,
        store: SharedStore,
        name: str,
        rank: int,
        members: tuple[int, ...],
        timeout: timedelta,
        *,
        device_index: int,
        address: str = "127.0.0.1",
        waits_on_host: bool = False,
        parent: tuple[Any, int] | None = None,
    ) -> None:
        self._waits_on_host = waits_on_host
        self._parent = parent
        self._ending: threading.Thread | None = None
        self._queue: torch.cuda.Stream | None = None  # of named operations
        try:
            super().__init__(store, name, rank, members, timeout, device_index=device_index, address=address)
        finally:
            self._parent = None

    @override
    def _make_group(self, store: Store) -> Any:
        self.capabilities = Capabilities(
            memory_kinds=frozenset(("cuda",)),
            messages=MessageOrder.MATCHED,
            bucket_bytes=25 << 20,
            waits_in_queue=not self._waits_on_host,
        )
        self._device = device = torch.device("cuda", self._device_index)
        # Before NCCL, and before anything allocates: else each rank's first context is on GPU 0.
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        options.global_ranks_in_group = list(self.members)
        options.group_name = f"unidist/{self._name}"  # type: ignore[assignment]  # a NewType of str in recent releases
        if self._parent is not None:
            options.split_from, options.split_color = self._parent
            config: Any = getattr(options, "config", None)
            if hasattr(config, "split_share"):
                config.split_share = 0  # NCCL runs groups that share memory one after the other
        on_host = _VARIABLES_ON_HOST if self._waits_on_host else {}
        with _environment, set_variables(_VARIABLES, keep=True), set_variables(on_host):
            group = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        # Now, and not in the first collective: a rank that does not come is an error of whoever asked for the group.
        _within(self.timeout, lambda: group.eager_connect_single_device(device), device)
        return group

    @override
    def _tensor(self, buffer: Buffer) -> torch.Tensor:
        tensor = tensor_of(buffer)
        if tensor.device != self._device:  # torch would connect the ranks on that device, too, and wait for all of them
            raise UsageError(
                f"a tensor on {tensor.device} on rank {self.rank} ({self.description}), whose device is "
                f"{self._device}: put models and batches on ud.device()"
            )
        return tensor

    @override
    def _make_work(
        self, what: str, works: list[Any], finish: Callable[[], None] | None, peer: int | None, *, may_leave: bool
    ) -> Work:
        return NcclWork(self, what, works, finish, on_host=self._waits_on_host)

    @override
    def _split_options(self, ranks: Sequence[int]) -> dict[str, Any]:
        # What a group has found out about devices and network holds for its parts, whose ranks need not meet again.
        parent = (self._group, min(ranks)) if _splits_groups() else None
        return {"waits_on_host": self._waits_on_host, "parent": parent}

    @override
    def _stay_out(self) -> None:
        if _splits_groups():
            _within(self.timeout, lambda: self._group.perform_nocolor_split(self._device), self._device)

    @override
    def allgather(self, source: Buffer, target: Buffer, *, counts: Sequence[int] | None = None) -> Work:
        """Concatenate: straight into the target where the pieces are equal, else by pieces that are padded."""
        given, result = self._tensor(source), self._tensor(target)
        is_equal = source.count * self.size == target.count and (counts is None or len(set(counts)) == 1)
        if not (is_equal and source.dtype is target.dtype):
            return super().allgather(source, target, counts=counts)
        # As bytes: NCCL does not know every type.
        own, all_pieces = given.view(torch.uint8), result.view(torch.uint8)
        return self._start(
            f"allgather of {source.dtype}[{target.count}]", lambda: self._group._allgather_base(all_pieces, own)
        )

    @override
    def reducescatter(
        self,
        source: Buffer,
        target: Buffer,
        *,
        op: ReduceOp = ReduceOp.SUM,
        scale: float = 1.0,
        counts: Sequence[int] | None = None,
    ) -> Work:
        """Reduce each piece to its owner: in one operation where the pieces are equal, and NCCL has the type."""
        given, result = self._tensor(source), self._tensor(target)
        is_equal = target.count * self.size == source.count and (counts is None or len(set(counts)) == 1)
        if not (is_equal and is_native(given.dtype) and source.dtype is target.dtype):
            return super().reducescatter(source, target, op=op, scale=scale, counts=counts)
        options = dist.ReduceScatterOptions()
        reduction, options.reduceOp = self._reduction(result, op, scale)
        return self._start(
            f"reducescatter of {source.dtype}[{source.count}]",
            lambda: self._group._reduce_scatter_base(result, given, options),
            reduction.finish,
        )

    @override
    def queueing(self) -> AbstractContextManager[Any]:
        with self._lock:
            if self._queue is None:
                self._queue = torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._queue)  # also makes the device current

    @override
    def allocate_on_device(self, count: int, dtype: DType) -> Buffer:
        return buffer_of(torch.zeros(count, dtype=TORCH_DTYPES[dtype], device=self._device))

    @override
    def copy_on_device(self, sources: Sequence[Buffer], targets: Sequence[Buffer]) -> None:
        torch._foreach_copy_([tensor_of(each) for each in targets], [tensor_of(each) for each in sources])

    @override
    def adasum_on_device(self, source: Buffer, target: Buffer, *, scale: float) -> None:
        values = tensor_of(target)
        if source.address != target.address:
            values.copy_(tensor_of(source))
        theirs = torch.empty_like(values)
        distance = 1
        while distance < self.size:
            partner = self.rank ^ distance
            counts = [values.numel() if rank == partner else 0 for rank in range(self.size)]
            self.alltoall(target, buffer_of(theirs), send_counts=counts, receive_counts=counts).wait()
            values.copy_(_combined(values, theirs) if self.rank < partner else _combined(theirs, values))
            distance *= 2
        if scale != 1.0:
            values.mul_(scale)

    @override
    def barrier(self) -> Work:
        token = torch.zeros(1, dtype=torch.uint8, device=self._device)
        work = self._start("barrier", lambda: self._group.allreduce([token]))
        assert isinstance(work, NcclWork)
        work.on_host = True  # ranks that have passed it are there, not only their devices' queues
        return work

    @override
    def _break(self, group: Any) -> None:
        """Abort in a thread: it ends only when kernels of the device's other communicators do, which are next."""
        with self._lock:
            if self._ending is None:
                self._ending = _in_thread(group.abort, f"abort of {self.description}")

    @override
    def close(self) -> None:
        """Let NCCL finish what was started, in a thread, since peers that never close would stop it."""
        if self._closed:
            return
        self._closed = True
        group, self._group = self._group, None
        with self._lock:
            if self._ending is None:
                self._ending = _in_thread(group.shutdown, f"end of {self.description}")
        self._ending.join(_CLOSE_SEC)
        self._store.release()


class NcclWork(Work):
    """Operations that were started in a group of NCCL, waited for together.

    Args:
        communicator: whose they are.
        what: the operation, for messages.
        works: torch's.
        finish: queues what is to be done with their results.
        on_host: `wait` returns when they are complete; else when the current stream is ordered behind them, unless it
            has a time limit.
    """

    def __init__(
        self,
        communicator: NcclCommunicator,
        what: str,
        works: list[Any],
        finish: Callable[[], None] | None,
        *,
        on_host: bool,
    ) -> None:
        self._communicator = communicator
        self._what = what
        self._works = works
        self._finish = finish
        self.on_host = on_host

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        """See `Work.wait`; without `on_host` and without `timeout`, complete means complete for the current stream."""
        communicator = self._communicator
        limit = communicator.timeout if timeout is None else timeout
        with communicator._translated(self._what, limit):
            if self.on_host or timeout is not None:
                self._wait_on_host(limit)
            if communicator._aborted:  # what is there now is no result
                raise RuntimeError("its communicator was aborted")
            for work in self._works:
                work.wait()
            self._works.clear()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    @override
    def done(self) -> bool:
        return bool(self._communicator._aborted) or all(work.is_completed() for work in self._works)

    def _wait_on_host(self, limit: timedelta) -> None:
        deadline = time.monotonic() + limit.total_seconds()
        while not self.done():
            if time.monotonic() >= deadline:
                self._communicator.break_connections()  # its kernel would occupy the device
                raise RuntimeError(f"not complete within {limit.total_seconds():g} s")
            time.sleep(_POLL_SEC)


def _combined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the Adasum of two vectors, see `unidist.algorithms.adasum`; the host does not wait."""
    wide_a, wide_b = a.double(), b.double()
    product = torch.dot(wide_a, wide_b)
    sizes = torch.dot(wide_a, wide_a), torch.dot(wide_b, wide_b)
    factors = [torch.where(size > 0, 1 - product / (2 * size), 1.0) for size in sizes]
    return factors[0] * wide_a + factors[1] * wide_b


def _splits_groups() -> bool:
    """Return whether this PyTorch can split a group of NCCL; the same on every rank."""
    kind: Any = getattr(dist, "ProcessGroupNCCL", None)
    return hasattr(kind, "perform_nocolor_split") and hasattr(kind.Options, "split_from")


def check_devices(devices: Sequence[str], *, members: Sequence[int], may_share: bool, version: tuple[int, ...]) -> None:
    """Raise ConfigurationError if two ranks use one device, and NCCL cannot connect them.

    Args:
        devices: the identifier of each rank's.
        members: the ranks, in the same order.
        may_share: the user allows it, see `ranks_may_share`.
        version: of NCCL.
    """
    ranks: dict[str, list[int]] = {}
    for rank, device in zip(members, devices, strict=True):
        ranks.setdefault(device, []).append(rank)
    shared = [f"ranks {', '.join(map(str, each))} use {device}" for device, each in ranks.items() if len(each) > 1]
    if shared and may_share and version < _SHARES_DEVICES:
        raise ConfigurationError(
            f"NCCL_MULTI_RANK_GPU_ENABLE=1, and {'; '.join(shared)}: that needs NCCL 2.30 or newer, and this is "
            f"{'.'.join(map(str, version))}. Use PyTorch 2.14 or newer, or load a newer libnccl.so.2 with LD_PRELOAD"
        )
    if shared and not may_share:
        raise ConfigurationError(
            f"engine nccl needs a device for each rank, but {'; '.join(shared)}. Start one rank for each device, give "
            "each rank its own by CUDA_VISIBLE_DEVICES, or use --engine gloo, which goes through host memory. NCCL "
            "2.30 and newer let ranks share a device with NCCL_MULTI_RANK_GPU_ENABLE=1"
        )


def socket_variables(address: str, interfaces: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the variables by which NCCL's sockets use the interface of this host's address in the job.

    Args:
        address: of this host.
        interfaces: addresses of each network interface of this host, by name.
    """
    for name, addresses in interfaces.items():
        if address in (each.partition("%")[0] for each in addresses):
            family = "AF_INET6" if ":" in address else "AF_INET"
            return {"NCCL_SOCKET_IFNAME": f"={name}", "NCCL_SOCKET_FAMILY": family}
    return {}


def _in_thread(function: Callable[[], None], what: str) -> threading.Thread:
    def run() -> None:
        try:
            function()
        except RuntimeError:
            _log.debug("%s failed", what, exc_info=True)

    thread = threading.Thread(target=run, name=f"unidist {what}", daemon=True)
    thread.start()
    return thread


def _within(limit: timedelta, connect: Callable[[], None], device: torch.device) -> None:
    """Connect; RuntimeError if that takes longer than `limit`, which NCCL has no limit for."""
    failures: list[RuntimeError] = []

    def run() -> None:
        try:
            torch.cuda.set_device(device)  # the current device is one of each thread
            connect()
        except RuntimeError as exc:
            failures.append(exc)

    thread = threading.Thread(target=run, name="unidist nccl connect", daemon=True)
    thread.start()
    thread.join(limit.total_seconds())
    if thread.is_alive():
        raise RuntimeError("NCCL has not connected the ranks")
    if failures:
        raise failures[0]
