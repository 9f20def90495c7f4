"""A world in one process: each rank is a thread, each message a copy of bytes.

It makes everything above the communicator testable without processes, and is the model of an engine that
can only send and receive:

>>> def main(communicator):
...     buffer = Buffer.of(bytearray([communicator.rank]))
...     communicator.allreduce(buffer, buffer).wait()
...     return buffer.bytes()[0]
>>> with ThreadWorld(4) as world:
...     world.run(main)
[6, 6, 6, 6]
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

from typing_extensions import override

from unidist.algorithms import PointToPointCommunicator
from unidist.buffer import Buffer
from unidist.communicator import COMPLETED, Capabilities, Communicator, Work, format_ranks
from unidist.errors import MismatchError, PeerLostError, StalledError, UnidistError, UsageError

R = TypeVar("R")


class ThreadWorld:
    """Communicators for `size` ranks in this process; use it in a `with` statement.

    Args:
        size: number of ranks.
        timeout: of every operation.
    """

    def __init__(self, size: int, *, timeout: timedelta = timedelta(seconds=20)) -> None:
        self._groups: list[_Group] = []
        group = _Group(tuple(range(size)), self._groups)
        self.communicators = tuple(ThreadCommunicator(group, rank, timeout) for rank in range(size))

    def run(self, func: Callable[[ThreadCommunicator], R], *, timeout: timedelta = timedelta(seconds=60)) -> list[R]:
        """Call `func(communicator)` on one thread per rank and return the results in rank order.

        The first rank that raises aborts the world, and its exception is raised here.

        Raises:
            StalledError: not all ranks returned within `timeout`; names them.
        """
        results: dict[int, R] = {}
        errors: list[BaseException] = []

        def main(communicator: ThreadCommunicator) -> None:
            try:
                results[communicator.rank] = func(communicator)
            except BaseException as exc:  # reported by the caller's thread
                errors.append(exc)
                self.abort(f"rank {communicator.rank} raised {type(exc).__name__}: {exc}")

        threads = [
            threading.Thread(target=main, args=(each,), name=f"rank-{each.rank}", daemon=True)
            for each in self.communicators
        ]
        deadline = time.monotonic() + timeout.total_seconds()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if late:
            self.abort(f"the run took more than {timeout.total_seconds():g} s")
            for thread in threads:
                thread.join(1.0)
        if errors:
            raise errors[0]
        if late:
            raise StalledError(
                f"ranks {format_ranks(late)} did not return within {timeout.total_seconds():g} s", ranks=late
            )
        return [results[rank] for rank in range(len(threads))]

    def abort(self, reason: str) -> None:
        """Abort every communicator of this world, the splits included."""
        for group in list(self._groups):
            group.abort(reason)

    def close(self) -> None:
        """Close every communicator of this world."""
        for communicator in self.communicators:
            communicator.close()

    def __enter__(self) -> ThreadWorld:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class ThreadCommunicator(PointToPointCommunicator):
    """One rank of a ThreadWorld, or of a part of it."""

    def __init__(self, group: _Group, rank: int, timeout: timedelta) -> None:
        self._group = group
        self._splits = 0
        self.rank = rank
        self.size = len(group.members)
        self.members = group.members
        self.timeout = timeout
        self.capabilities = Capabilities()
        self.description = f"threads, ranks {format_ranks(group.members)}"

    @override
    def send(self, buffer: Buffer, *, to: int) -> Work:
        """Send a message; the data are copied at once."""
        self.check_rank(to, "to")
        self._group.deliver(self.rank, to, bytes(buffer.bytes()))
        return COMPLETED

    @override
    def recv(self, buffer: Buffer, *, source: int) -> Work:
        self.check_rank(source, "source")
        receipt = _Receipt(self._group, buffer, source, self.rank, self.timeout)
        self._group.expect(receipt)
        return receipt

    @override
    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """Split the group; returns when all members of the part have called it."""
        self._splits += 1
        if not ranks:
            return None
        for rank in ranks:
            self.check_rank(rank, "ranks")
        if self.rank not in ranks or len(set(ranks)) != len(ranks):
            raise UsageError(
                f"split({list(ranks)}) on rank {self.rank}: give each member once, this rank included, or ()"
            )
        group = self._group.part(self._splits, tuple(ranks), self.rank, self.timeout)
        return ThreadCommunicator(group, list(ranks).index(self.rank), self.timeout)

    @override
    def abort(self, reason: str) -> None:
        super().abort(reason)
        self._group.abort(f"rank {self.rank} aborted: {reason}")

    @override
    def close(self) -> None:
        """Close the channel; the others can still receive what was sent before."""
        super().close()
        self._group.leave(self.rank)


@dataclass
class _Channel:
    """Messages from one rank to another that nobody has asked for yet, or receipts that still wait for one."""

    messages: deque[bytes] = field(default_factory=deque)
    receipts: deque[_Receipt] = field(default_factory=deque)


class _Group:
    """The shared state of the ranks of one communicator. Its condition guards the attributes below it."""

    def __init__(self, members: tuple[int, ...], groups: list[_Group]) -> None:
        self.members = members
        self.condition = threading.Condition()
        self.aborted: str | None = None
        self._closed: set[int] = set()
        self._channels = {(i, j): _Channel() for i in range(len(members)) for j in range(len(members))}
        self._parts: dict[tuple[int, tuple[int, ...]], _Group] = {}
        self._come: dict[tuple[int, tuple[int, ...]], set[int]] = {}
        self._groups = groups
        groups.append(self)

    def deliver(self, source: int, to: int, message: bytes) -> None:
        """Hand `message` to the oldest waiting receipt, or keep it for the next one."""
        with self.condition:
            self._check(source)
            channel = self._channels[source, to]
            if channel.receipts:
                channel.receipts.popleft().fill(message)
                self.condition.notify_all()
            else:
                channel.messages.append(message)

    def expect(self, receipt: _Receipt) -> None:
        """Fill `receipt` with the oldest message from its source, or let it wait for the next one."""
        with self.condition:
            self._check(receipt.rank)
            channel = self._channels[receipt.source, receipt.rank]
            if channel.messages:
                receipt.fill(channel.messages.popleft())
            elif receipt.source in self._closed:
                receipt.error = self._lost(receipt.source)
            else:
                channel.receipts.append(receipt)

    def part(self, number: int, ranks: tuple[int, ...], rank: int, timeout: timedelta) -> _Group:
        """Return the group that call `number` of split makes of `ranks`, once they have all come.

        Waiting here, in the group that is split, lets an abort of it reach ranks that others do not follow.
        """
        with self.condition:
            self._check(rank)
            key = (number, ranks)
            if key not in self._parts:
                self._parts[key] = _Group(tuple(self.members[each] for each in ranks), self._groups)
            part, come = self._parts[key], self._come.setdefault(key, set())
            come.add(rank)
            self.condition.notify_all()
            self.condition.wait_for(lambda: len(come) == len(ranks) or self.aborted, timeout.total_seconds())
            missing = set(ranks) - come
            if not missing:
                return part
            self._check(rank)
        limit = f"{timeout.total_seconds():g} s"
        reason = f"split on rank {rank}: ranks {format_ranks(tuple(missing))} did not come within {limit}"
        self.abort(reason)
        raise StalledError(reason, ranks=missing)

    def abort(self, reason: str) -> None:
        """End every wait of the group. The first reason stays."""
        with self.condition:
            self.aborted = self.aborted or reason
            for channel in self._channels.values():
                channel.receipts.clear()  # their buffers go back to their owners
            self.condition.notify_all()

    def leave(self, rank: int) -> None:
        """End the operations of `rank`, and the waits for messages that it did not send."""
        with self.condition:
            self._closed.add(rank)
            for (source, _), channel in self._channels.items():
                while source == rank and channel.receipts:
                    channel.receipts.popleft().error = self._lost(rank)
            self.condition.notify_all()

    def _check(self, rank: int) -> None:
        if self.aborted is not None:
            raise PeerLostError(self.aborted)
        if rank in self._closed:
            raise UsageError(f"rank {rank} uses its communicator after close()")

    def _lost(self, rank: int) -> PeerLostError:
        return PeerLostError(f"rank {rank} closed its communicator", ranks=(rank,))


class _Receipt(Work):
    """A receive under way."""

    def __init__(self, group: _Group, buffer: Buffer, source: int, rank: int, timeout: timedelta) -> None:
        self.source, self.rank = source, rank
        self._group, self._buffer, self._timeout = group, buffer, timeout
        self.error: UnidistError | None = None
        self._filled = False

    def fill(self, message: bytes) -> None:
        """Copy `message` into the buffer; called with the group's condition held."""
        if len(message) != self._buffer.nbytes:
            self.error = MismatchError(
                f"rank {self.rank} receives {self._buffer.nbytes} bytes from rank {self.source}, "
                f"which sent {len(message)}; make both sizes equal"
            )
            return
        self._buffer.bytes()[:] = message
        self._filled = True

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        limit = self._timeout if timeout is None else timeout
        with self._group.condition:
            self._group.condition.wait_for(self._ended, limit.total_seconds())
            if self.error is not None:
                raise self.error
            if self._filled:
                return
            if self._group.aborted is not None:
                raise PeerLostError(self._group.aborted)
        reason = f"rank {self.rank} got no message from rank {self.source} within {limit.total_seconds():g} s"
        self._group.abort(reason)
        raise StalledError(reason, ranks=(self.source,))

    @override
    def done(self) -> bool:
        with self._group.condition:
            return self._ended()

    def _ended(self) -> bool:
        return self._filled or self.error is not None or self._group.aborted is not None
