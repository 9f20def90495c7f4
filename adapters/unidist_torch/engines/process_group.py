"""Communicators over torch.distributed's process groups (gloo, NCCL)."""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from typing_extensions import override

from unidist.buffer import Buffer, DType
from unidist.communicator import (
    COMPLETED,
    Communicator,
    ReduceOp,
    Work,
    equal_counts,
    format_ranks,
)
from unidist.errors import PeerLostError, UsageError
from unidist_torch.engines.carriers import CarriedReduction
from unidist_torch.engines.group_work import GroupWork, Translation
from unidist_torch.engines.store import SharedStore

TORCH_OPS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
}


_ROUNDING = 1e-12
"""Of n times 1/n."""

_MAX_TAG = 0x7FFFFFFF
PROBE_TAG, BREAK_TAG = _MAX_TAG - 1, _MAX_TAG
"""Tags of no message."""


class ProcessGroupCommunicator(Communicator):
    """The common part of the communicators over gloo and NCCL.

    Args:
        store: that all members reach; this communicator shares it until it is closed.
        name: of the group; distinct for every group on one store.
        rank: of this process in the group.
        members: world ranks.
        timeout: of every operation.
        device_index: GPU of this process.
        address: at which the other members reach this process.
    """

    backend: str
    polls_messages = True
    """The backend knows whether a message is complete without being waited on."""
    waits_in_slices = False
    """A wait for a collective may be given up and begun again: so an abort by another thread is seen."""
    averages = False
    """The backend can divide by the number of ranks before it adds up."""

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
    ) -> None:
        self.rank = rank
        self.size = len(members)
        self.members = members
        self.timeout = timeout
        self.description = f"{self.backend}, ranks {format_ranks(members)}"
        self._store = store
        self._name = name
        self._device_index = device_index
        self._address = address
        self._splits = itertools.count()
        self._aborted = ""
        self._abandoned = False  # a thread of the group still waits for a peer that says nothing
        self._closed = False
        self._unfinished: weakref.WeakSet[GroupWork] = weakref.WeakSet()  # some may be finished
        self._sent = [0] * self.size
        self._received = [0] * self.size
        self._lock = threading.Lock()
        store.share()
        try:
            with self._translated("connect", timeout):
                self._group: Any = self._make_group(PrefixStore(f"unidist/{name}", store.store))
        except BaseException:
            store.release()
            raise

    @abstractmethod
    def _make_group(self, store: Store) -> Any:
        """Return the process group."""

    def _split_options(self, ranks: Sequence[int]) -> dict[str, Any]:
        """Return further arguments for a communicator over these ranks of this one, which is split from it."""
        return {}

    def _stay_out(self) -> None:
        """Do what a rank of this group has to do where others make a group without it."""

    @abstractmethod
    def _tensor(self, buffer: Buffer) -> torch.Tensor:
        """Return a flat tensor over the buffer, on a device that the group moves."""

    def _reduction(self, result: torch.Tensor, op: ReduceOp, scale: float) -> tuple[CarriedReduction, Any]:
        """Return the reduction of a tensor, and torch's operation for it.

        A mean is divided before it is added up where the backend can: sums of 16 bits do not overflow then, and nobody
        passes over the result once more.
        """
        divides = self.averages and op is ReduceOp.SUM and scale * self.size <= 1.0 + _ROUNDING
        if not (divides and (result.is_floating_point() or result.is_complex())):
            reduction = CarriedReduction(result, op, scale)
            return reduction, TORCH_OPS[reduction.op]
        rest = scale * self.size
        return CarriedReduction(result, op, 1.0 if abs(rest - 1.0) <= _ROUNDING else rest), dist.ReduceOp.AVG

    @override
    def allreduce(self, source: Buffer, target: Buffer, *, op: ReduceOp = ReduceOp.SUM, scale: float = 1.0) -> Work:
        _check_operands(source, target, source.count, "allreduce")
        result, given = self._tensor(target), self._tensor(source)
        if result.data_ptr() != given.data_ptr():
            result.copy_(given)
        options = dist.AllreduceOptions()
        reduction, options.reduceOp = self._reduction(result, op, scale)
        return self._start(
            f"allreduce of {source.dtype}[{source.count}]",
            lambda: self._group.allreduce([reduction.carrier], options),
            reduction.finish,
            may_leave=False,
        )

    @override
    def allgather(self, source: Buffer, target: Buffer, *, counts: Sequence[int] | None = None) -> Work:
        pieces = list(equal_counts(target.count, self.size) if counts is None else counts)
        _check_operands(source, target, sum(pieces), "allgather")
        if len(pieces) != self.size or source.count != pieces[self.rank]:
            raise UsageError(f"allgather: counts={pieces} do not fit {source.count} elements of rank {self.rank}")
        # Unequal pieces travel padded: neither backend gathers them.
        largest = max(pieces)
        given, result = _bytes(self._tensor(source)), _bytes(self._tensor(target))
        item = source.dtype.itemsize
        outputs = list(result.split([count * item for count in pieces]))
        if len(set(pieces)) == 1:
            padded, received = given, outputs
        else:
            padded = torch.zeros(largest * item, dtype=torch.uint8, device=given.device)
            padded[: given.numel()] = given
            received = [torch.empty_like(padded) for _ in pieces]

        def unpack() -> None:
            if received is not outputs:
                for output, piece in zip(outputs, received, strict=True):
                    output.copy_(piece[: output.numel()])

        return self._start(
            f"allgather of {source.dtype}{pieces}",
            lambda: self._group.allgather([received], [padded]),
            unpack,
            may_leave=False,
        )

    @override
    def broadcast(self, buffer: Buffer, *, root: int) -> Work:
        self.check_rank(root, "root")
        options = dist.BroadcastOptions()
        options.rootRank = root
        tensor = _bytes(self._tensor(buffer))
        return self._start(
            f"broadcast of {buffer.dtype}[{buffer.count}] from rank {root}",
            lambda: self._group.broadcast([tensor], options),
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
        """Reduce each piece to its owner."""
        pieces = list(equal_counts(source.count, self.size) if counts is None else counts)
        if len(pieces) != self.size or sum(pieces) != source.count:
            raise UsageError(f"reducescatter: counts={pieces} do not add up to {source.count} elements")
        _check_operands(source, target, pieces[self.rank], "reducescatter")
        result = self._tensor(target)
        reductions = [
            self._reduction(piece.clone(), op, scale) for piece in self._tensor(source).split(pieces)
        ]  # clones: reduce() uses its input as scratch memory

        def start() -> list[Any]:
            works = []
            for root, (reduction, torch_op) in enumerate(reductions):
                if pieces[root]:
                    options = dist.ReduceOptions()
                    options.reduceOp = torch_op
                    options.rootRank = root
                    works.append(self._group.reduce([reduction.carrier], options))
            return works

        def finish() -> None:
            own, _ = reductions[self.rank]
            own.finish()
            result.copy_(own.result)

        return self._start(f"reducescatter of {source.dtype}{pieces}", start, finish)

    @override
    def alltoall(
        self, source: Buffer, target: Buffer, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Work:
        sent, received = list(send_counts), list(receive_counts)
        if len(sent) != self.size or len(received) != self.size or sum(sent) != source.count:
            raise UsageError(f"alltoall: send_counts={sent} do not fit {source.count} elements and {self.size} ranks")
        _check_operands(source, target, sum(received), "alltoall")
        item = source.dtype.itemsize
        given, result = _bytes(self._tensor(source)), _bytes(self._tensor(target))
        return self._start(
            f"alltoall of {source.dtype}{sent}",
            lambda: self._group.alltoall_base(
                result,
                given,
                [count * item for count in received],
                [count * item for count in sent],
                dist.AllToAllOptions(),
            ),
        )

    @override
    def send(self, buffer: Buffer, *, to: int) -> Work:
        self.check_rank(to, "to")
        tensor = _bytes(self._tensor(buffer))
        if to == self.rank:
            raise UsageError(f"rank {to} cannot send to itself over {self.backend}; copy the tensor")
        with self._lock:
            self._sent[to] += 1
            tag = self._sent[to] % PROBE_TAG
        return self._start(f"send to rank {to}", lambda: self._group.send([tensor], to, tag), peer=to)

    @override
    def recv(self, buffer: Buffer, *, source: int) -> Work:
        self.check_rank(source, "source")
        tensor = _bytes(self._tensor(buffer))
        if source == self.rank:
            raise UsageError(f"rank {source} cannot receive from itself over {self.backend}")
        with self._lock:
            self._received[source] += 1
            tag = self._received[source] % PROBE_TAG
        return self._start(f"recv from rank {source}", lambda: self._group.recv([tensor], source, tag), peer=source)

    @override
    def barrier(self) -> Work:
        token = Buffer.allocate(1, DType.UINT8)
        return self.allreduce(token, token)

    @override
    def split(self, ranks: Sequence[int]) -> Communicator | None:
        chosen = tuple(ranks)
        for rank in chosen:
            self.check_rank(rank, "ranks")
        if chosen and (self.rank not in chosen or len(set(chosen)) != len(chosen)):
            raise UsageError(
                f"split: rank {self.rank} passed ranks {chosen}; pass each rank once, this one included, or ()"
            )
        # A member that is gone shows here at once; the making of a group would wait for it until the timeout.
        self.barrier().wait()
        number = next(self._splits)
        if not chosen:
            with self._translated("split", self.timeout):
                self._stay_out()
            return None
        # Members agree on the name; different groups of one split differ in their first member.
        return type(self)(
            self._store,
            f"{self._name}/{number}.{min(chosen)}",
            chosen.index(self.rank),
            tuple(self.members[rank] for rank in chosen),
            self.timeout,
            device_index=self._device_index,
            address=self._address,
            **self._split_options(chosen),
        )

    @override
    def abort(self, reason: str) -> None:
        """Abort; peers see a broken connection."""
        self._aborted = self._aborted or reason or "no reason given"
        self.break_connections()

    def break_connections(self) -> None:
        """Make operations that wait for a peer fail, here and on the peers. Callable from any thread."""
        group = self._group  # another thread may close
        if group is not None:
            self._break(group)

    def probe(self, peer: int) -> None:
        """Raise RuntimeError if the connection to a peer is lost, which the backend may not report to a message."""
        if self._group is not None:
            self._probe(self._group, peer)

    def lost_peers(self) -> list[int]:
        """Return the ranks to which the connection is lost."""
        lost = []
        for peer in range(self.size):
            if peer != self.rank:
                try:
                    self.probe(peer)
                except RuntimeError:
                    lost.append(peer)
        return lost

    def _break(self, group: Any) -> None:
        """Close the connections of a group."""
        group.abort()

    def _probe(self, group: Any, peer: int) -> None:
        """Do `probe` in a group; not needed if the backend reports it to every message."""

    @override
    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._abandoned:
                # Its end would wait for that thread, with Python's lock held: it stays until the process ends.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
            elif self._aborted:
                self.break_connections()  # else the group's end waits for what its threads wait for, and peers do, too
                for work in list(self._unfinished):
                    work.abandon()
            self._group = None
            self._store.release()

    def _start(
        self,
        what: str,
        start: Callable[[], Any],
        finish: Callable[[], None] | None = None,
        *,
        peer: int | None = None,
        may_leave: bool = True,
    ) -> Work:
        self._check_open()
        if self._aborted:
            raise PeerLostError(
                f"{what} on rank {self.rank}: this communicator was aborted ({self.description}): {self._aborted}"
            )
        with self._translated(what, self.timeout):
            works = start()
        works = works if isinstance(works, list) else [works]
        if not works and finish is None:
            return COMPLETED
        return self._make_work(what, works, finish, peer, may_leave=may_leave)

    def _make_work(
        self, what: str, works: list[Any], finish: Callable[[], None] | None, peer: int | None, *, may_leave: bool
    ) -> Work:
        """Return what is waited for."""
        work = GroupWork(self, what, works, finish, peer, may_leave=may_leave)
        self._unfinished.add(work)
        return work

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"this communicator is closed ({self.description})")

    def _translated(self, what: str, timeout: timedelta, peer: int | None = None) -> Translation:
        return Translation(self, what, timeout, peer)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _check_operands(source: Buffer, target: Buffer, count: int, what: str) -> None:
    if source.dtype != target.dtype or target.count != count or source.memory != target.memory:
        raise UsageError(
            f"{what}: the target must be {source.dtype}[{count}] in {source.memory} memory, "
            f"not {target.dtype}[{target.count}] in {target.memory} memory"
        )
