"""A communicator for engines that can only send and receive: every collective is made from messages."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from typing_extensions import override

from unidist.algorithms import _checks, collectives
from unidist.algorithms._messages import cut, speaking_for
from unidist.algorithms._reduce import check_reduction
from unidist.algorithms.allreduce import ALGORITHMS
from unidist.buffer import Buffer, copy
from unidist.communicator import COMPLETED, Communicator, ReduceOp, Work
from unidist.errors import UsageError, unknown_choice


class PointToPointCommunicator(Communicator):
    """Collectives over the `send` and `recv` of a subclass; see `unidist.testing.threads` for an example.

    A subclass implements `send`, `recv`, `split`, `abort` and `close`, the last two calling `super()` first.
    Its `split` must not use collectives of this communicator: they send their messages over a
    separate split, apart from the user's messages, which is made when the first collective runs.

    Collectives are complete when the call returns, so the work that they return is always done. Each message
    of one waits at most `timeout`.

    Attributes:
        algorithm: name of the all-reduce algorithm, see `ALGORITHMS`; the same on every rank.
    """

    algorithm: str = "butterfly"
    _channel: Communicator | None = None
    _aborted: str | None = None
    _ended = False

    @property
    def channel(self) -> Communicator | None:
        """The split over which collectives send their messages; None before the first collective."""
        return self._channel

    @abstractmethod
    @override
    def abort(self, reason: str) -> None:
        """Abort the channel of the collectives. Subclasses call this first."""
        self._aborted = reason
        if self._channel is not None:
            self._channel.abort(reason)

    @abstractmethod
    @override
    def close(self) -> None:
        """Close the channel of the collectives. Subclasses call this first."""
        self._ended = True
        if self._channel is not None:
            self._channel.close()

    @override
    def allreduce(self, source: Buffer, target: Buffer, *, op: ReduceOp = ReduceOp.SUM, scale: float = 1.0) -> Work:
        """Reduce by the algorithm named in `algorithm`."""
        if self.algorithm not in ALGORITHMS:
            raise unknown_choice("allreduce algorithm", self.algorithm, ALGORITHMS)
        _checks.check_same_type("allreduce", source, target)
        _checks.check_count("allreduce", "target", target, source.count)
        check_reduction(target, op)
        with self._collective(f"allreduce ({self.algorithm}) of {source.count} {source.dtype}") as channel:
            copy(source, target)
            ALGORITHMS[self.algorithm](channel, target, op=op, scale=scale)
        return COMPLETED

    @override
    def allgather(self, source: Buffer, target: Buffer, *, counts: Sequence[int] | None = None) -> Work:
        _checks.check_same_type("allgather", source, target)
        counts = _checks.checked_counts("allgather", counts, [source.count] * self.size, self)
        _checks.check_count("allgather", "source", source, counts[self.rank])
        _checks.check_count("allgather", "target", target, sum(counts))
        with self._collective(f"allgather of {target.count} {target.dtype}") as channel:
            pieces = cut(target, counts)
            copy(source, pieces[self.rank])
            collectives.ring_allgather(channel, pieces)
        return COMPLETED

    @override
    def broadcast(self, buffer: Buffer, *, root: int) -> Work:
        self.check_rank(root, "root")
        with self._collective(f"broadcast of {buffer.count} {buffer.dtype} from rank {root}") as channel:
            collectives.binomial_broadcast(channel, buffer, root=root)
        return COMPLETED

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
        _checks.check_same_type("reducescatter", source, target)
        counts = _checks.checked_counts("reducescatter", counts, [target.count] * self.size, self)
        _checks.check_count("reducescatter", "target", target, counts[self.rank])
        _checks.check_count("reducescatter", "source", source, sum(counts))
        check_reduction(target, op)
        with self._collective(f"reducescatter of {source.count} {source.dtype}") as channel:
            collectives.ring_reducescatter(channel, cut(source, counts), target, op=op, scale=scale)
        return COMPLETED

    @override
    def alltoall(
        self, source: Buffer, target: Buffer, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Work:
        _checks.check_same_type("alltoall", source, target)
        send_counts = _checks.checked_counts("alltoall", send_counts, (), self)
        receive_counts = _checks.checked_counts("alltoall", receive_counts, (), self)
        _checks.check_count("alltoall", "source", source, sum(send_counts))
        _checks.check_count("alltoall", "target", target, sum(receive_counts))
        with self._collective(f"alltoall of {source.count} {source.dtype}") as channel:
            collectives.pairwise_alltoall(channel, cut(source, send_counts), cut(target, receive_counts))
        return COMPLETED

    @override
    def barrier(self) -> Work:
        with self._collective("barrier") as channel:
            collectives.dissemination_barrier(channel)
        return COMPLETED

    @contextmanager
    def _collective(self, operation: str) -> Iterator[Communicator]:
        """Give the channel of the collectives; errors of its messages become those of the operation."""
        if self._ended:  # a group of one sends no message that would notice
            raise UsageError(f"{operation}: this communicator is closed ({self.description})")
        with speaking_for(self, operation):
            yield self._channel or self._open_channel()

    def _open_channel(self) -> Communicator:
        channel = self.split(range(self.size))
        assert channel is not None, "split(range(size)) includes every rank"
        self._channel = channel
        # An abort from another thread may have come after split() looked and before the line above.
        if self._aborted is not None:
            channel.abort(self._aborted)
        return channel
