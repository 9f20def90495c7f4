"""Point-to-point messages of one group: their memory, and the works that wait for them.

A sender posts where in its engine memory the bytes are; the receiver copies them out. Neither waits when it
posts: what cannot be moved yet is queued on the C side, and moves whenever this process waits or polls.
"""

from __future__ import annotations

import threading
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING

from typing_extensions import override

from unidist.buffer import Buffer, copy
from unidist.communicator import COMPLETED, Work
from unidist.engines import _shm
from unidist.engines._arena import Allocation, Arena
from unidist.engines._outbox import Outbox
from unidist.engines._shm_work import DTYPE_CODES, Status, nanoseconds, unpack
from unidist.errors import MismatchError

if TYPE_CHECKING:
    from unidist.engines._shm_communicator import ShmCommunicator


class Mailbox:
    """The messages of one communicator, on this rank.

    Args:
        rank: this rank in the group.
        group: the C side.
        arena: this rank's engine memory.
    """

    def __init__(self, rank: int, group: _shm.Group, arena: Arena) -> None:
        # Not the communicator itself: a circle of references would keep its memory after close().
        self._rank = rank
        self._group = group
        self._outbox = Outbox(arena)
        self._lock = threading.RLock()
        self._outgoing: dict[int, deque[tuple[int, Buffer, Allocation | None]]] = {}  # the last: of the outbox
        self._incoming: dict[int, deque[ReceiveWork]] = {}

    def send(self, communicator: ShmCommunicator, buffer: Buffer, to: int) -> Work:
        """Post a message. Engine memory is read by the receiver in place; other memory is copied at once."""
        group = self._group
        with self._lock:
            communicator.check_open()  # else there is no memory for a copy any more
            self._reap(to)
            offset = group.offset(buffer.address, buffer.nbytes)
            own: Allocation | None = None
            if offset < 0:
                own = self._outbox.take(buffer.nbytes)
                copy(buffer, own.buffer(buffer.nbytes).cast(buffer.dtype))
                offset = own.offset
            number, is_visible = group.send(to, offset, buffer.nbytes, DTYPE_CODES[buffer.dtype])
            if number < 0:
                communicator.raise_outcome(number, f"send to rank {to}", communicator.timeout)
            self._outgoing.setdefault(to, deque()).append((number, buffer, own))
            if own is not None and is_visible:
                return COMPLETED
            return SendWork(communicator, to, number, is_copy=own is not None)

    def receive(self, communicator: ShmCommunicator, buffer: Buffer, source: int) -> Work:
        """Ask for the next message of `source`."""
        with self._lock:
            number = self._group.receive(source, buffer.address, buffer.nbytes, DTYPE_CODES[buffer.dtype])
            if number < 0:
                communicator.raise_outcome(number, f"recv from rank {source}", communicator.timeout)
            work = ReceiveWork(communicator, self, source, buffer, number)
            self._incoming.setdefault(source, deque()).append(work)
            return work

    def note_received(self, work: ReceiveWork) -> None:
        """Note that `work` and all earlier ones of its source are complete, and which messages did not fit."""
        with self._lock:
            work.check_open()  # else nobody knows any more which receives there were, and which did not fit
            for source, number, nbytes, dtype in self._group.misfits():
                misfit = next(item for item in self._incoming[source] if item.number == number)
                misfit.error = MismatchError(
                    f"recv on rank {self._rank} asked rank {source} for {misfit.buffer.nbytes} bytes of "
                    f"{misfit.buffer.dtype}, but the message has {nbytes} bytes of {dtype}. The message is lost."
                )
            queue = self._incoming[work.source]
            while not work.finished:
                queue.popleft().finished = True

    def close(self) -> None:
        """Forget everything. Messages that the receiver has not taken stay readable while it is there."""
        with self._lock:
            for queue in self._outgoing.values():
                for _, _, own in queue:
                    if own is not None:
                        own.abandon()
            self._outgoing.clear()
            self._incoming.clear()
            self._outbox.close()

    def _reap(self, to: int) -> None:
        """Forget the memory of messages that rank `to` has taken."""
        outgoing = self._outgoing.get(to)
        while outgoing and self._group.wait_sent(to, outgoing[0][0], 0) == 0:
            _, _, own = outgoing.popleft()
            if own is not None:
                self._outbox.give_back(own)


class SendWork(Work):
    """A message on its way.

    Args:
        communicator: it belongs to.
        to: the receiver.
        number: of the message.
        is_copy: the message is a copy, complete as soon as the receiver can see it; else when it was read.
    """

    def __init__(self, communicator: ShmCommunicator, to: int, number: int, *, is_copy: bool) -> None:
        self._communicator = communicator
        self._to = to
        self._number = number
        self._is_copy = is_copy

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        limit = self._communicator.timeout if timeout is None else timeout
        outcome = self._advance(nanoseconds(limit))
        if outcome:
            self._communicator.raise_outcome(outcome, f"send to rank {self._to}", limit, waits_for_one=True)

    @override
    def done(self) -> bool:
        outcome = self._advance(0)
        return outcome == 0 or unpack(outcome)[0] is not Status.PENDING

    def _advance(self, timeout_ns: int) -> int:
        self._communicator.check_open()
        group = self._communicator.group
        wait = group.wait_visible if self._is_copy else group.wait_sent
        return wait(self._to, self._number, timeout_ns)


class ReceiveWork(Work):
    """A message to come; messages of one sender are taken in the order in which they were asked for.

    Attributes:
        source: the sender.
        buffer: where the message goes.
        number: of the message, counted per sender.
        finished: it is there.
        error: it is there, but did not fit.
    """

    def __init__(
        self, communicator: ShmCommunicator, mailbox: Mailbox, source: int, buffer: Buffer, number: int
    ) -> None:
        self.source = source
        self.buffer = buffer
        self.number = number
        self.finished = False
        self.error: MismatchError | None = None
        self._communicator = communicator
        self._mailbox = mailbox

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        limit = self._communicator.timeout if timeout is None else timeout
        outcome = self._advance(nanoseconds(limit))
        if outcome:
            self._communicator.raise_outcome(outcome, f"recv from rank {self.source}", limit, waits_for_one=True)
        if self.error is not None:
            raise self.error

    @override
    def done(self) -> bool:
        outcome = self._advance(0)
        return outcome == 0 or unpack(outcome)[0] is not Status.PENDING

    def check_open(self) -> None:
        """Raise UsageError if the communicator is closed."""
        self._communicator.check_open()

    def _advance(self, timeout_ns: int) -> int:
        if self.finished:
            return 0
        self.check_open()
        outcome = self._communicator.group.wait_received(self.source, self.number, timeout_ns)
        if not outcome:
            self._mailbox.note_received(self)
        return outcome
