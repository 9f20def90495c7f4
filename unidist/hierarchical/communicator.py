"""A communicator over several hosts: what can stay inside a host does.

An all-reduce of n elements on hosts with m ranks each: reduce-scatter inside the host, so that each rank has n/m
elements of its host's sum; all-reduce of these between the ranks of one row; all-gather inside. So a host sends what
one rank alone would send, over m connections at a time. (Horovod's hierarchical all-reduce works likewise.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial

from typing_extensions import override

from unidist.algorithms import _checks
from unidist.algorithms._reduce import check_reduction
from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import Communicator, MessageOrder, ReduceOp, Work, equal_counts, format_ranks
from unidist.communicator_capabilities import SharedMemory, SharesMemory
from unidist.errors import ConfigurationError, PeerLostError, StalledError, UsageError
from unidist.hierarchical.layout import Layout
from unidist.hierarchical.pipeline import OperationPipeline, OperationStage, WorkOfParts
from unidist.hierarchical.scratch import Scratch

_INSIDE, _BETWEEN, _BACK = 0, 1, 2

_PART_BYTES = 8 << 20
_MAX_PARTS = 4
"""Parts let what is inside and what is between hosts overlap. Each costs every rank some stages: few are enough."""

DIRECT_BYTES = 32 << 10
"""Up to this size an operation is one of `outer`: stages cost more in latency than they save in bytes."""


class HierarchicalCommunicator(Communicator, SharesMemory):
    """Composes a communicator inside each host with one between all ranks. Host memory only.

    Making one is collective over `outer`. It takes both over: `close` and `abort` reach them.

    Args:
        outer: over all ranks of the group.
        inner: over those of this host, in ascending order of their ranks in `outer`.
        layout: which ranks share a host, by their ranks in `outer`.
        direct_bytes: see `DIRECT_BYTES`; equal on every rank.
    """

    def __init__(
        self, outer: Communicator, inner: Communicator, layout: Layout, *, direct_bytes: int = DIRECT_BYTES
    ) -> None:
        self.rank, self.size, self.members, self.timeout = outer.rank, outer.size, outer.members, outer.timeout
        self._layout = layout
        self._direct_bytes = direct_bytes
        self._host, self._index = layout.host_of(self.rank), layout.index_of(self.rank)
        assert (inner.rank, inner.size) == (self._index, len(layout.hosts[self._host]))
        self.description = (
            f"{outer.description.partition(',')[0]} between {len(layout.hosts)} hosts, "
            f"{inner.description.partition(',')[0]} inside, ranks {format_ranks(self.members)}"
        )
        limits = [each.capabilities.num_pending for each in (outer, inner) if each.capabilities.num_pending is not None]
        self.capabilities = replace(
            outer.capabilities,
            memory_kinds=frozenset((HOST,)),
            dtypes=outer.capabilities.dtypes & inner.capabilities.dtypes,
            messages=_stricter(outer.capabilities.messages, inner.capabilities.messages),
            detects_mismatch=False,
            negotiates=False,
            engine_memory=inner.capabilities.engine_memory,
            num_pending=min(limits) if limits else None,
            adds_in_rank_order=False,
        )
        self._outer, self._inner = outer, inner
        # Where all ranks share a host, or none do, there is nothing to compose.
        sizes = {len(ranks) for ranks in layout.hosts}
        self._flat = inner if len(layout.hosts) == 1 else outer if sizes == {1} else None
        self._parts: list[Communicator] = [inner, outer]
        self._aborted = ""
        self._closed = False
        self._scratch = Scratch(inner.allocate if inner.capabilities.engine_memory else _ordinary)
        self._pipeline = OperationPipeline(self.timeout, translate=self._translate, stalled=self._stalled)
        if self._flat is None:
            self._inside, self._back = _copy_of(inner), _copy_of(inner)
            row = layout.row(self._index) if self._index < layout.num_rows else ()
            self._between = outer.split(row)
            self._parts += [self._inside, self._back, *([self._between] if self._between else [])]

    @override
    def allreduce(self, source: Buffer, target: Buffer, *, op: ReduceOp = ReduceOp.SUM, scale: float = 1.0) -> Work:
        _checks.check_same_type("allreduce", source, target)
        _checks.check_count("allreduce", "target", target, source.count)
        check_reduction(target, op)
        self._check_open("allreduce")
        if (direct := self._direct(source.nbytes)) is not None:
            return self._pipeline.adopt(direct.allreduce(source, target, op=op, scale=scale))
        part = max(1, _PART_BYTES // source.dtype.itemsize, -(-source.count // _MAX_PARTS))
        return WorkOfParts(
            [
                self._post_allreduce(source.slice(start, count), target.slice(start, count), op, scale)
                for start in range(0, max(1, source.count), part)
                for count in (min(part, source.count - start),)
            ]
        )

    def _post_allreduce(self, source: Buffer, target: Buffer, op: ReduceOp, scale: float) -> Work:
        pieces = self._layout.pieces(source.count)
        counts = pieces + [0] * (self._inner.size - len(pieces))
        # The own piece stays where it belongs in the target: ranks of this host read it there.
        own = target.slice(sum(counts[: self._index]), counts[self._index])
        between = self._between
        return self._pipeline.post(
            f"allreduce of {source.dtype}[{source.count}]",
            [
                OperationStage(_INSIDE, lambda: self._inside.reducescatter(source, own, op=op, counts=counts)),
                OperationStage(
                    _BETWEEN,
                    lambda: between.allreduce(own, own, op=op, scale=scale) if between and own.count else None,
                ),
                OperationStage(_BACK, lambda: self._back.allgather(own, target, counts=counts)),
            ],
        )

    @override
    def allgather(self, source: Buffer, target: Buffer, *, counts: Sequence[int] | None = None) -> Work:
        counts = list(_checks.checked_counts("allgather", counts, [target.count // self.size] * self.size, self))
        _checks.check_same_type("allgather", source, target)
        _checks.check_count("allgather", "source", source, counts[self.rank])
        _checks.check_count("allgather", "target", target, sum(counts))
        self._check_open("allgather")
        if (direct := self._direct(target.nbytes, self._layout.is_regular)) is not None:
            return self._pipeline.adopt(direct.allgather(source, target, counts=counts))
        between = self._between
        assert between is not None, "in a regular layout every rank is in a row"
        of_row = [counts[rank] for rank in self._layout.row(self._index)]
        lent = self._scratch.borrow(sum(of_row) * source.dtype.itemsize)
        gathered = lent.slice(0, sum(of_row) * source.dtype.itemsize).cast(source.dtype)
        return self._pipeline.post(
            f"allgather of {source.dtype}{counts}",
            [
                OperationStage(_BETWEEN, lambda: between.allgather(source, gathered, counts=of_row)),
                *(
                    OperationStage(_BACK, partial(self._back.allgather, piece, block, counts=of_host))
                    for piece, block, of_host in self._blocks(counts, gathered, target)
                ),
                OperationStage(_BACK, lambda: self._scratch.give_back(lent)),
            ],
        )

    @override
    def broadcast(self, buffer: Buffer, *, root: int) -> Work:
        self.check_rank(root, "root")
        self._check_open("broadcast")
        index = self._layout.index_of(root)
        if (direct := self._direct(buffer.nbytes, index < self._layout.num_rows)) is not None:
            return self._pipeline.adopt(direct.broadcast(buffer, root=root))
        between = self._between if self._index == index else None
        host = self._layout.host_of(root)
        return self._pipeline.post(
            f"broadcast of {buffer.dtype}[{buffer.count}] from rank {root}",
            [
                OperationStage(_BETWEEN, lambda: between.broadcast(buffer, root=host) if between else None),
                OperationStage(_BACK, lambda: self._back.broadcast(buffer, root=index)),
            ],
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
        default = equal_counts(source.count, self.size) if counts is None else ()
        counts = list(_checks.checked_counts("reducescatter", counts, default, self))
        _checks.check_same_type("reducescatter", source, target)
        _checks.check_count("reducescatter", "source", source, sum(counts))
        _checks.check_count("reducescatter", "target", target, counts[self.rank])
        check_reduction(target, op)
        self._check_open("reducescatter")
        if (direct := self._direct(source.nbytes, self._layout.is_regular)) is not None:
            return self._pipeline.adopt(direct.reducescatter(source, target, op=op, scale=scale, counts=counts))
        between = self._between
        assert between is not None, "in a regular layout every rank is in a row"
        of_row = [counts[rank] for rank in self._layout.row(self._index)]
        lent = self._scratch.borrow(sum(of_row) * source.dtype.itemsize)
        sums = lent.slice(0, sum(of_row) * source.dtype.itemsize).cast(source.dtype)
        return self._pipeline.post(
            f"reducescatter of {source.dtype}{counts}",
            [
                *(
                    OperationStage(_INSIDE, partial(self._inside.reducescatter, block, piece, op=op, counts=of_host))
                    for piece, block, of_host in self._blocks(counts, sums, source)
                ),
                OperationStage(
                    _BETWEEN, lambda: between.reducescatter(sums, target, op=op, scale=scale, counts=of_row)
                ),
                OperationStage(_BETWEEN, lambda: self._scratch.give_back(lent)),
            ],
        )

    def _blocks(
        self, counts: Sequence[int], by_host: Buffer, by_rank: Buffer
    ) -> Iterator[tuple[Buffer, Buffer, list[int]]]:
        """For each host, yield this rank's piece in `by_host`, all ranks' block in `by_rank`, and their counts."""
        piece_start = block_start = 0
        for ranks in self._layout.hosts:
            of_host = [counts[rank] for rank in ranks]
            piece = by_host.slice(piece_start, of_host[self._index])
            block = by_rank.slice(block_start, sum(of_host))
            yield piece, block, of_host
            piece_start += piece.count
            block_start += block.count

    @override
    def alltoall(
        self, source: Buffer, target: Buffer, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Work:
        """Exchange pieces between all ranks directly, as each has one source and one target."""
        self._check_open("alltoall")
        direct = self._flat or self._outer
        return self._pipeline.adopt(
            direct.alltoall(source, target, send_counts=send_counts, receive_counts=receive_counts)
        )

    @override
    def send(self, buffer: Buffer, *, to: int) -> Work:
        self.check_rank(to, "to")
        self._check_open("send")
        part, rank = self._route(to)
        return self._pipeline.adopt(part.send(buffer, to=rank))

    @override
    def recv(self, buffer: Buffer, *, source: int) -> Work:
        self.check_rank(source, "source")
        self._check_open("recv")
        part, rank = self._route(source)
        return self._pipeline.adopt(part.recv(buffer, source=rank))

    @override
    def barrier(self) -> Work:
        self._check_open("barrier")
        if (direct := self._direct(0)) is not None:
            return self._pipeline.adopt(direct.barrier())
        between = self._between if self._index == 0 else None
        return self._pipeline.post(
            "barrier",
            [
                OperationStage(_INSIDE, self._inside.barrier),
                OperationStage(_BETWEEN, lambda: between.barrier() if between else None),
                OperationStage(_BACK, self._back.barrier),
            ],
        )

    @override
    def split(self, ranks: Sequence[int]) -> Communicator | None:
        self._check_open("split")
        chosen = tuple(ranks)
        outer = self._outer.split(chosen)  # checks the ranks too
        layout = Layout.of([self._layout.host_of(rank) for rank in chosen])
        here = self._layout.hosts[self._host]
        inner = self._inner.split([here.index(rank) for rank in chosen if rank in here])
        if outer is None or inner is None:
            return None
        return HierarchicalCommunicator(outer, inner, layout, direct_bytes=self._direct_bytes)

    @override
    def allocate(self, nbytes: int) -> Buffer:
        """Return memory of the engine within the host."""
        return self._inner.allocate(nbytes)

    @override
    def sharing_obstacle(self) -> str:
        """Return why memory cannot be shared; a group of ranks of one host, from `split`, can."""
        if self._flat is not self._inner:
            return f"its ranks are on {len(self._layout.hosts)} hosts, which have no memory in common"
        if not isinstance(self._inner, SharesMemory):
            return f"the engine inside the host cannot share memory between ranks ({self._inner.description})"
        return self._inner.sharing_obstacle()

    @override
    def allocate_shared(self, nbytes: int) -> SharedMemory:
        self._check_open("allocate_shared")
        obstacle = self.sharing_obstacle()
        if obstacle:
            raise ConfigurationError(f"ranks cannot share memory ({self.description}): {obstacle}")
        assert isinstance(self._inner, SharesMemory)
        return self._inner.allocate_shared(nbytes)

    @override
    def abort(self, reason: str) -> None:
        self._aborted = self._aborted or reason or "no reason given"
        for part in self._parts:
            part.abort(reason)

    @override
    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pipeline.end(self._closed_error("an operation"))
            self._scratch.clear()
            for part in reversed(self._parts):
                part.close()

    def _direct(self, nbytes: int, has_stages: bool = True) -> Communicator | None:
        """Return the part that runs an operation as it is; None: it runs in stages. The same on every rank."""
        if self._flat is None and (nbytes <= self._direct_bytes or not has_stages):
            return self._outer
        return self._flat

    def _route(self, rank: int) -> tuple[Communicator, int]:
        """Return the part by which another rank is reached, and its rank there."""
        here = self._layout.hosts[self._host]
        return (self._inner, here.index(rank)) if rank in here else (self._outer, rank)

    def _check_open(self, what: str) -> None:
        if self._closed or self._aborted:
            raise self._closed_error(what)

    def _closed_error(self, what: str) -> Exception:
        """Return the error for an operation that an abort or, without one, `close` has ended."""
        if self._aborted:
            return PeerLostError(
                f"{what} on rank {self.rank}: this communicator was aborted ({self.description}): {self._aborted}"
            )
        return UsageError(f"{what}: this communicator is closed ({self.description})")

    def _translate(self, what: str, error: BaseException, lane: int) -> BaseException:
        """End the communicator, for other ranks wait in stages that this one will not come to; name ranks of ours."""
        reason = self._aborted or str(error)
        self.abort(f"rank {self.rank} failed in {what}: {error}")
        text = f"{what} on rank {self.rank} ({self.description}): {reason}"
        if isinstance(error, PeerLostError):
            here = self._layout.hosts[self._host]
            row = self._layout.row(self._index) if self._index < self._layout.num_rows else ()
            names: Sequence[int] = row if lane == _BETWEEN else here
            return type(error)(text, ranks=[names[rank] for rank in error.ranks if rank < len(names)])
        return error

    def _stalled(self, what: str, limit: timedelta) -> BaseException:
        text = f"{what} on rank {self.rank}: not complete after {limit.total_seconds():g} seconds ({self.description})"
        self.abort(text)
        return StalledError(text)


def _ordinary(nbytes: int) -> Buffer:
    return Buffer.allocate(nbytes, DType.UINT8)


def _copy_of(communicator: Communicator) -> Communicator:
    made = communicator.split(range(communicator.size))
    assert made is not None, "split(range(size)) includes every rank"
    return made


def _stricter(one: MessageOrder, other: MessageOrder) -> MessageOrder:
    strictness = (MessageOrder.ANY, MessageOrder.MATCHED, MessageOrder.NONE)
    return max(one, other, key=strictness.index)
