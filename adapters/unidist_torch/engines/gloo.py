"""gloo as a communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from typing_extensions import override

from unidist.buffer import HOST, Buffer
from unidist.communicator import Capabilities, ReduceOp, Work
from unidist.errors import PeerLostError, StalledError
from unidist_torch.engines.process_group import BREAK_TAG, PROBE_TAG, ProcessGroupCommunicator
from unidist_torch.memory import buffer_of, tensor_of

_FIRST_ATTEMPT = timedelta(seconds=5)  # many times what thousands of connections take on a busy host


class GlooCommunicator(ProcessGroupCommunicator):
    """gloo over TCP, at the address of this host in the job; device tensors are staged through host memory."""

    backend = "gloo"
    waits_in_slices = True
    polls_messages = False  # is_completed() of a message becomes true in wait() only

    def _make_group(self, store: Store) -> Any:
        self.capabilities = Capabilities(memory_kinds=frozenset(("host", "cuda")), bucket_bytes=25 << 20)
        failure: RuntimeError | None = None
        for number, limit in enumerate(_attempts(self.timeout)):
            place = PrefixStore(str(number), store)
            group, failure = None, None
            try:
                group = self._connect(place, limit)
            except RuntimeError as exc:
                if isinstance(exc, PeerLostError) and not isinstance(exc, StalledError):
                    raise
                failure = exc
            if self._all_connected(place, group is not None):
                self._pass_barrier(group)
                return group
        raise failure or RuntimeError("other ranks of the group could not connect")

    def _connect(self, store: Store, limit: timedelta) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # public in practice, not annotated
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._address)]
        options._timeout = limit / 5  # gloo gives a connection five times as long
        options._threads = 2
        group: Any = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        # PyTorch 2.6 has the second name alone.
        (getattr(group, "set_timeout", None) or group._set_default_timeout)(self.timeout)
        return group

    def _all_connected(self, store: Store, is_connected: bool) -> bool:
        """Tell the other members, and return whether all of them are connected. The store raises if one is lost."""
        store.set(f"connected/{self.rank}", "1" if is_connected else "0")
        keys = [f"connected/{member}" for member in range(self.size)]
        store.wait(keys, self.timeout)
        return all(store.get(key) == b"1" for key in keys)

    def _pass_barrier(self, group: Any) -> None:
        """Return when no member needs the store any more: the rank that serves it may leave the group at once."""
        try:
            group.barrier(dist.BarrierOptions()).wait(self.timeout)
        except BaseException:
            self._break(group)  # the error's traceback refers to the group, which would keep the connections
            raise

    def _tensor(self, buffer: Buffer) -> torch.Tensor:
        return tensor_of(buffer)

    def _break(self, group: Any) -> None:
        # abort() of torch's gloo does nothing, and connections stay while anything refers to a message of the group.
        # But a receive that takes too long closes all of them. From a peer that is lost already it fails at once, and
        # closes none: hence one from each.
        token = torch.zeros(1, dtype=torch.uint8)
        for peer in range(self.size):
            if peer != self.rank:
                with suppress(RuntimeError):
                    group.recv([token], peer, BREAK_TAG).wait(timedelta(milliseconds=1))

    def _probe(self, group: Any, peer: int) -> None:
        # gloo tells a lost connection to what waits to be moved, and forgets the message that is being moved. Anything
        # new fails; nobody receives this one.
        group.send([torch.zeros(1, dtype=torch.uint8)], peer, PROBE_TAG)

    # gloo itself moves device tensors in some operations only: all of them go through host memory here.

    @override
    def allreduce(self, source: Buffer, target: Buffer, *, op: ReduceOp = ReduceOp.SUM, scale: float = 1.0) -> Work:
        return _on_host(super().allreduce, source, target, op=op, scale=scale)

    @override
    def allgather(self, source: Buffer, target: Buffer, *, counts: Sequence[int] | None = None) -> Work:
        return _on_host(super().allgather, source, target, counts=counts)

    @override
    def broadcast(self, buffer: Buffer, *, root: int) -> Work:
        return _on_host(super().broadcast, buffer, root=root)

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
        return _on_host(super().reducescatter, source, target, op=op, scale=scale, counts=counts)

    @override
    def alltoall(
        self, source: Buffer, target: Buffer, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Work:
        return _on_host(super().alltoall, source, target, send_counts=send_counts, receive_counts=receive_counts)

    @override
    def send(self, buffer: Buffer, *, to: int) -> Work:
        return _on_host(super().send, buffer, writes=False, to=to)

    @override
    def recv(self, buffer: Buffer, *, source: int) -> Work:
        return _on_host(super().recv, buffer, reads=False, source=source)


def _attempts(timeout: timedelta) -> Iterator[timedelta]:
    """Return how long each attempt to connect may take: each twice as long as the one before, and all the timeout.

    gloo waits for a peer that died while they connected until its timeout. An attempt that fails shows the loss.
    """
    left, limit = timeout, _FIRST_ATTEMPT
    while left > timedelta(0):
        limit = left if left < 2 * limit else limit
        yield limit
        left, limit = left - limit, 2 * limit


def _on_host(
    operation: Callable[..., Work], *buffers: Buffer, reads: bool = True, writes: bool = True, **arguments: Any
) -> Work:
    """Run an operation on host copies of device buffers.

    Args:
        operation: reads the first buffer, and writes to the last one.
        buffers: one or two; they may be the same memory.
        reads: False: it only writes.
        writes: False: it only reads.
        arguments: of the operation.
    """
    if all(buffer.memory == HOST for buffer in buffers):
        return operation(*buffers, **arguments)
    first, target = tensor_of(buffers[0]), tensor_of(buffers[-1])
    copy = result = first.cpu() if reads else torch.empty_like(first, device="cpu")
    if (buffers[0].address, buffers[0].nbytes) != (buffers[-1].address, buffers[-1].nbytes):
        result = torch.empty_like(target, device="cpu")
    copies = (copy, result)[: len(buffers)]
    work = operation(*map(buffer_of, copies), **arguments)
    return _StagedWork(work, lambda: target.copy_(copies[-1])) if writes else work


class _StagedWork(Work):
    def __init__(self, inner: Work, copy_back: Callable[[], object]) -> None:
        self._inner = inner
        self._copy_back: Callable[[], object] | None = copy_back

    def wait(self, timeout: timedelta | None = None) -> None:
        self._inner.wait(timeout)
        if self._copy_back is not None:
            copy_back, self._copy_back = self._copy_back, None
            copy_back()

    def done(self) -> bool:
        return self._inner.done()
