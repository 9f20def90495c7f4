"""A communicator whose all-reduce is one of ours, over the send and recv of any engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from typing_extensions import override

from unidist.algorithms import _checks
from unidist.algorithms._messages import speaking_for
from unidist.algorithms._reduce import check_reduction
from unidist.algorithms.allreduce import ALGORITHMS
from unidist.buffer import HOST, Buffer, copy
from unidist.communicator import COMPLETED, Communicator, MessageOrder, ReduceOp, ReportsArrivals, Work
from unidist.errors import ConfigurationError, UsageError, unknown_choice


class AlgorithmCommunicator(Communicator, ReportsArrivals):
    """Runs `allreduce` by the named algorithm; everything else is the inner communicator's own.

    Creating one is collective over `inner`: messages of the all-reduce travel over a split of it, apart from
    the user's. It takes `inner` over: `close` and `abort` reach both. An all-reduce is complete when the call
    returns, and moves host memory only.

    Args:
        inner: a communicator that can send and receive.
        name: the algorithm, a key of `ALGORITHMS`; the same on every rank.

    Raises:
        ConfigurationError: the algorithm is unknown, or the engine cannot send and receive host memory.
    """

    def __init__(self, inner: Communicator, name: str) -> None:
        if name not in ALGORITHMS:
            raise unknown_choice("allreduce algorithm", name, ALGORITHMS)
        if inner.capabilities.messages is not MessageOrder.ANY or HOST not in inner.capabilities.memory_kinds:
            raise ConfigurationError(
                f"--allreduce-algorithm {name} needs an engine that sends and receives host memory, "
                f"and {inner.description} does not. Choose another --engine, or leave the algorithm to the engine."
            )
        channel = inner.split(range(inner.size))
        assert channel is not None, "split(range(size)) includes every rank"
        self._inner, self._channel, self._name = inner, channel, name
        self._allreduce = ALGORITHMS[name]
        self._closed = False
        self.rank, self.size, self.members, self.timeout = inner.rank, inner.size, inner.members, inner.timeout
        self.capabilities = replace(
            inner.capabilities, memory_kinds=frozenset((HOST,)), detects_mismatch=False, adds_in_rank_order=False
        )
        self.description = f"{inner.description}, {name} all-reduce"

    @override
    def allreduce(self, source: Buffer, target: Buffer, *, op: ReduceOp = ReduceOp.SUM, scale: float = 1.0) -> Work:
        """Run the operation to its end; it is complete when the call returns."""
        _checks.check_same_type("allreduce", source, target)
        _checks.check_count("allreduce", "target", target, source.count)
        check_reduction(target, op)
        if self._closed:  # a group of one sends no message that would notice
            raise UsageError(f"allreduce: this communicator is closed ({self.description})")
        copy(source, target)
        with speaking_for(self, f"allreduce of {source.count} {source.dtype}"):
            self._allreduce(self._channel, target, op=op, scale=scale)
        return COMPLETED

    def allgather(self, source: Buffer, target: Buffer, *, counts: Sequence[int] | None = None) -> Work:
        """The inner communicator's."""
        return self._inner.allgather(source, target, counts=counts)

    def broadcast(self, buffer: Buffer, *, root: int) -> Work:
        """The inner communicator's."""
        return self._inner.broadcast(buffer, root=root)

    def reducescatter(
        self,
        source: Buffer,
        target: Buffer,
        *,
        op: ReduceOp = ReduceOp.SUM,
        scale: float = 1.0,
        counts: Sequence[int] | None = None,
    ) -> Work:
        """The inner communicator's."""
        return self._inner.reducescatter(source, target, op=op, scale=scale, counts=counts)

    def alltoall(
        self, source: Buffer, target: Buffer, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Work:
        """The inner communicator's."""
        return self._inner.alltoall(source, target, send_counts=send_counts, receive_counts=receive_counts)

    def send(self, buffer: Buffer, *, to: int) -> Work:
        """The inner communicator's."""
        return self._inner.send(buffer, to=to)

    def recv(self, buffer: Buffer, *, source: int) -> Work:
        """The inner communicator's."""
        return self._inner.recv(buffer, source=source)

    def barrier(self) -> Work:
        """The inner communicator's."""
        return self._inner.barrier()

    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """Split the inner communicator; the new one uses the same algorithm."""
        part = self._inner.split(ranks)
        return None if part is None else AlgorithmCommunicator(part, self._name)

    def allocate(self, nbytes: int) -> Buffer:
        """The inner communicator's."""
        return self._inner.allocate(nbytes)

    def waiting_for(self) -> Sequence[int]:
        """What the inner communicator and its split for messages say, where they can."""
        parts = [part for part in (self._inner, self._channel) if isinstance(part, ReportsArrivals)]
        return sorted({rank for part in parts for rank in part.waiting_for()})

    def abort(self, reason: str) -> None:
        """Abort the inner communicator and its split for messages."""
        self._inner.abort(reason)
        self._channel.abort(reason)

    def close(self) -> None:
        """Close the inner communicator and its split for messages."""
        self._closed = True
        self._channel.close()
        self._inner.close()
