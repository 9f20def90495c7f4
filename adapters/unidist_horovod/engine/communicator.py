"""Horovod as a communicator."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

from typing_extensions import override

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, ReduceOp, Work, equal_counts
from unidist.errors import MismatchError, UsageError
from unidist.negotiation.named import NamedOperations, NegotiatesNames, NegotiationOptions
from unidist.topology import Topology
from unidist_horovod.bindings.carriers import HorovodReduction, array_of, marks, moved, num_moved
from unidist_horovod.bindings.interface import MOVED_DTYPES, WORLD_SET, OperationFailed, Pending
from unidist_horovod.engine.group import HorovodGroup
from unidist_horovod.engine.links import Links
from unidist_horovod.engine.process import HorovodProcess
from unidist_horovod.engine.works import HorovodWork, ReceiveWork, SendWork


class HorovodCommunicator(HorovodGroup, NegotiatesNames):
    """One group of ranks: a process set of Horovod, and a name that keeps its operations apart from other groups'.

    Horovod matches operations by name; those of this communicator are numbered, and every kind has its own
    shape, so that ranks which call differently get Horovod's error where it compares, and a stall where it does not.
    """

    def __init__(
        self,
        process: HorovodProcess,
        links: Links,
        name: str,
        members: tuple[int, ...],
        rank: int,
        process_set: int,
        timeout: timedelta,
        *,
        is_world: bool = False,
    ) -> None:
        super().__init__(process, links, name, members, rank, process_set, timeout, is_world=is_world)
        self._issued = itertools.count()
        self._splits = itertools.count()
        self._by_turn: dict[int, weakref.ref[Pending]] = {}

    @classmethod
    def of_world(
        cls, process: HorovodProcess, links: Links, topology: Topology, timeout: timedelta
    ) -> HorovodCommunicator:
        """Return the communicator over all ranks, which gives back `process` and `links` when it is closed."""
        members = tuple(range(topology.world_size))
        return cls(process, links, links.name, members, topology.rank, WORLD_SET, timeout, is_world=True)

    # Collectives

    @override
    def allreduce(self, source: Buffer, target: Buffer, *, op: ReduceOp = ReduceOp.SUM, scale: float = 1.0) -> Work:
        _check_match(source, target, source.count, "allreduce")
        reduction = HorovodReduction(source, target, op, scale)
        shape = (reduction.given.count, *reduction.marks)
        return self._issue(
            f"allreduce of {source.dtype}[{source.count}]",
            lambda name: self.process.binding.allreduce(
                reduction.given,
                reduction.result,
                shape=shape,
                op=reduction.op,
                scale=reduction.scale,
                name=name,
                members=self.process_set,
            ),
            reduction.finish,
        )

    @override
    def allgather(self, source: Buffer, target: Buffer, *, counts: Sequence[int] | None = None) -> Work:
        pieces = list(equal_counts(target.count, self.size) if counts is None else counts)
        _check_match(source, target, sum(pieces), "allgather")
        if len(pieces) != self.size or source.count != pieces[self.rank]:
            raise UsageError(f"allgather: counts={pieces} do not fit {source.count} elements of rank {self.rank}")
        given, result = moved(source), moved(target)
        received = result if self.is_in_order else Buffer.allocate(result.count, result.dtype)

        def reorder() -> None:
            if not self.is_in_order:
                _copy_pieces(received, [pieces[rank] for rank in self.order], result, pieces, self.order, source.dtype)

        return self._issue(
            f"allgather of {source.dtype}{pieces}",
            lambda name: self.process.binding.allgather(
                given,
                received,
                shape=(given.count, *marks(source.dtype, MOVED_DTYPES)),
                name=name,
                members=self.process_set,
            ),
            reorder,
        )

    @override
    def broadcast(self, buffer: Buffer, *, root: int) -> Work:
        self.check_rank(root, "root")
        data = moved(buffer)
        return self._issue(
            f"broadcast of {buffer.dtype}[{buffer.count}] from rank {root}",
            lambda name: self.process.binding.broadcast(
                data,
                shape=(data.count, *marks(buffer.dtype, MOVED_DTYPES)),
                root=self.members[root],
                name=name,
                members=self.process_set,
            ),
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
        """All-reduce, and keep the piece of this rank: Horovod's own reduce-scatter only sums, and divides evenly."""
        pieces = list(equal_counts(source.count, self.size) if counts is None else counts)
        if len(pieces) != self.size or sum(pieces) != source.count:
            raise UsageError(f"reducescatter: counts={pieces} do not add up to {source.count} elements")
        _check_match(source, target, pieces[self.rank], "reducescatter")
        what = f"reducescatter of {source.dtype}{pieces}"
        start = sum(pieces[: self.rank])
        outcome = Buffer.allocate(source.count, source.dtype)
        reduction = HorovodReduction(source, outcome, op, scale)

        def keep() -> None:
            reduction.finish()
            array_of(target)[:] = array_of(outcome.slice(start, target.count))

        return self._issue(
            what,
            lambda name: self.process.binding.allreduce(
                reduction.given,
                reduction.result,
                shape=(1, reduction.given.count, *reduction.marks),
                op=reduction.op,
                scale=reduction.scale,
                name=name,
                members=self.process_set,
            ),
            keep,
        )

    @override
    def alltoall(
        self, source: Buffer, target: Buffer, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Work:
        sent, expected = list(send_counts), list(receive_counts)
        if len(sent) != self.size or len(expected) != self.size or sum(sent) != source.count:
            raise UsageError(f"alltoall: send_counts={sent} do not fit {source.count} elements and {self.size} ranks")
        _check_match(source, target, sum(expected), "alltoall")
        what = f"alltoall of {source.dtype}{sent}"
        sent_in_order, expected_in_order = [sent[i] for i in self.order], [expected[i] for i in self.order]
        given, result, factor = moved(source), moved(target), num_moved(source.dtype)
        if not self.is_in_order:
            reordered = Buffer.allocate(given.count, given.dtype)
            _copy_pieces(given, sent, reordered, sent_in_order, _inverse(self.order), source.dtype)
            given = reordered
        pending: list[Pending] = []

        def start(name: str) -> Pending:
            # Horovod sizes the output by what arrives, which may be too much for the target: so it gets its own memory.
            pending.append(
                self.process.binding.alltoall(
                    given,
                    None,
                    shape=(given.count, *marks(source.dtype, MOVED_DTYPES)),
                    splits=[count * factor for count in sent_in_order],
                    name=name,
                    members=self.process_set,
                )
            )
            return pending[0]

        def take() -> None:
            found = [count // factor for count in pending[0].received]
            if found != expected_in_order:
                raise MismatchError(
                    f"{what} on rank {self.rank}: it expects {expected_in_order} elements from the ranks "
                    f"{self.order}, which sent {found}"
                )
            _copy_pieces(pending[0].output, found, result, expected, self.order, source.dtype)

        return self._issue(what, start, take)

    @override
    def barrier(self) -> Work:
        token = Buffer.allocate(1, DType.INT32)
        return self._issue(
            "barrier",
            lambda name: self.process.binding.allreduce(
                token, token, shape=(1, 1, 1, 1), op=ReduceOp.MAX, scale=1.0, name=name, members=self.process_set
            ),
        )

    # Messages

    @override
    def send(self, buffer: Buffer, *, to: int) -> Work:
        """Send over the links, since Horovod has no messages."""
        what = self._check_message(f"send of {buffer.nbytes} bytes to rank {to}", to, "to")
        return SendWork(self, what, to, self.links.send(self.members[to], self.name, buffer))

    @override
    def recv(self, buffer: Buffer, *, source: int) -> Work:
        what = self._check_message(f"recv of {buffer.nbytes} bytes from rank {source}", source, "source")
        receipt = self.mailbox.expect(self.members[source], buffer)
        self.links.claimed(self.members[source])
        return ReceiveWork(self, what, source, receipt)

    def _check_message(self, what: str, peer: int, role: str) -> str:
        self.check_rank(peer, role)
        self.check_issue(what)
        if peer == self.rank:
            raise UsageError(f"{what}: rank {peer} cannot exchange messages with itself; copy the buffer")
        return what

    # Groups

    @override
    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """Return a communicator over a process set, made by all ranks of the job, until Horovod stops.

        Raises:
            ConfigurationError: a group of a group, with ranks for which no process set exists.
        """
        from unidist_horovod.engine.subgroups import split

        return split(self, tuple(ranks))

    def next_split(self) -> int:
        """Return the number of the next split; for `split`."""
        return next(self._splits)

    @override
    def named_operations(self, options: NegotiationOptions) -> NamedOperations:
        from unidist_horovod.engine.named_operations import HorovodNamedOperations

        return HorovodNamedOperations(self, options)

    def _issue(self, what: str, start: Callable[[str], Pending], finish: Callable[[], None] | None = None) -> Work:
        self.check_issue(what)
        number = next(self._issued)
        num_names = self.process.binding.num_names
        turn = number if num_names is None else number % num_names
        if num_names is not None:
            self._end_turn(turn, what, number - num_names)
        try:
            pending = start(f"{self.name}.{turn}")
        except OperationFailed as exc:
            raise self.translated(what, exc) from None
        if num_names is not None:
            self._by_turn[turn] = weakref.ref(pending)
        return HorovodWork(self, what, number, [pending], finish)

    def _end_turn(self, turn: int, what: str, number: int) -> None:
        """Wait until operation `number` has ended, whose name is used again, on every rank for the same operation."""
        earlier = self._by_turn.pop(turn, None)
        pending = earlier() if earlier is not None else None
        if pending is not None and not pending.done():
            HorovodWork(self, f"{what}, waiting for an earlier operation", number, [pending]).settle(self.timeout)


def _inverse(order: Sequence[int]) -> list[int]:
    inverse = [0] * len(order)
    for position, rank in enumerate(order):
        inverse[rank] = position
    return inverse


def _copy_pieces(
    source: Buffer,
    source_counts: Sequence[int],
    target: Buffer,
    target_counts: Sequence[int],
    places: Sequence[int],
    dtype: DType,
) -> None:
    """Copy piece i of `source` to piece `places[i]` of `target`; counts are of elements of `dtype`."""
    factor = num_moved(dtype)
    given, result = array_of(source), array_of(target)
    starts = list(itertools.accumulate(target_counts, initial=0))
    begin = 0
    for piece, count in enumerate(source_counts):
        start = starts[places[piece]] * factor
        result[start : start + count * factor] = given[begin : begin + count * factor]
        begin += count * factor


def _check_match(source: Buffer, target: Buffer, count: int, what: str) -> None:
    if source.dtype != target.dtype or target.count != count or source.memory != target.memory:
        raise UsageError(
            f"{what}: the target must be {source.dtype}[{count}] in {source.memory} memory, "
            f"not {target.dtype}[{target.count}] in {target.memory} memory"
        )
