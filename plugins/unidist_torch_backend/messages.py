"""Point-to-point messages with tags, and from any sender, over a communicator that has neither.

Each message is preceded by a header: its tag and its size. A receiver reads header after header of a sender; a message
that nobody waits for yet is kept.
"""

from __future__ import annotations

import math
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from unidist.buffer import Buffer, DType, copy
from unidist.communicator import Communicator, Work, format_ranks
from unidist.errors import MismatchError, StalledError

_HEADER = struct.Struct("<qq")  # tag, bytes
_FIRST_PAUSE_SEC = 20e-6
_LONGEST_PAUSE_SEC = 1e-3


@dataclass
class PendingReceive:
    """A message that somebody waits for.

    Attributes:
        sources: ranks from which it may come.
        tag: that it must have.
        buffer: where it goes, as bytes.
        sender: who sent it, once it is there.
        is_done: it is there, or `error` says why not.
        error: what went wrong.
    """

    sources: tuple[int, ...]
    tag: int
    buffer: Buffer
    sender: int = -1
    is_done: bool = False
    error: BaseException | None = None


@dataclass
class _Sender:
    """Known messages of one rank."""

    header: Buffer | None = None
    header_work: Work | None = None
    payload: Buffer | None = None
    payload_work: Work | None = None
    receive: PendingReceive | None = None  # that the payload is for
    tag: int = 0
    early: dict[int, deque[Buffer]] = field(default_factory=dict)


class GroupMessages:
    """The messages of one group, on this rank. From any thread.

    Args:
        communicator: carries nothing else than these messages, beside collectives.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._senders = [_Sender() for _ in range(communicator.size)]
        self._waiting: list[PendingReceive] = []
        self._lock = threading.Lock()
        self._sending = threading.Lock()

    def send(self, data: Buffer, to: int, tag: int) -> Sequence[Work]:
        """Send bytes; they must not change before the works are done."""
        header = Buffer.of(bytearray(_HEADER.pack(tag, data.nbytes)))
        with self._sending:
            works = [self._communicator.send(header, to=to)]
            if data.nbytes:
                works.append(self._communicator.send(data.cast(DType.UINT8), to=to))
        return works

    def receive(self, target: Buffer, sources: Sequence[int], tag: int) -> PendingReceive:
        """Ask for the next message with this tag that one of `sources` sends."""
        receive = PendingReceive(tuple(sources), tag, target.cast(DType.UINT8))
        with self._lock:
            for source in sources:
                early = self._senders[source].early.get(tag)
                if early:
                    self._deliver(receive, source, early.popleft())
                    return receive
            self._waiting.append(receive)
        self.advance(receive)
        return receive

    def advance(self, receive: PendingReceive) -> bool:
        """Move what `receive` waits for, without waiting; return whether it is done."""
        if not receive.is_done:
            with self._lock:
                try:
                    for source in receive.sources:
                        self._advance(source)
                except Exception as exc:
                    self._fail(receive, exc)
        return receive.is_done

    def wait(self, receive: PendingReceive, limit: timedelta) -> None:
        """Return when `receive` is done, or raise its error."""
        deadline = time.monotonic() + limit.total_seconds()
        pause = _FIRST_PAUSE_SEC
        while not self.advance(receive):
            left = deadline - time.monotonic()
            pending = self._pending(receive.sources[0]) if len(receive.sources) == 1 else None
            try:
                if pending is not None:
                    pending.wait(timedelta(seconds=max(math.ceil(10 * left) / 10, 0.1)))  # a round number, for messages
                elif left <= 0:
                    raise StalledError(
                        f"recv on rank {self._communicator.rank} ({self._communicator.description}): no message with "
                        f"tag {receive.tag} came from rank(s) {format_ranks(receive.sources)} within "
                        f"{limit.total_seconds():g} s",
                        ranks=receive.sources,
                    )
                else:
                    time.sleep(min(pause, left))
                    pause = min(2 * pause, _LONGEST_PAUSE_SEC)
            except Exception as exc:
                with self._lock:
                    self._fail(receive, exc)
        if receive.error is not None:
            raise receive.error

    def _pending(self, source: int) -> Work | None:
        with self._lock:
            sender = self._senders[source]
            return sender.payload_work or sender.header_work

    def _advance(self, source: int) -> None:
        """Take what has come from one rank, and ask for more if somebody waits for it. With the lock held."""
        sender = self._senders[source]
        while True:
            if sender.payload_work is not None:
                if not sender.payload_work.done():
                    return
                sender.payload_work.wait()
                self._arrived(source)
            if sender.header_work is None:
                if not any(source in receive.sources for receive in self._waiting):
                    return
                sender.header = Buffer.of(bytearray(_HEADER.size))
                sender.header_work = self._communicator.recv(sender.header, source=source)
            if not sender.header_work.done():
                return
            sender.header_work.wait()
            assert sender.header is not None, "it is asked for together with its work"
            sender.tag, nbytes = _HEADER.unpack(sender.header.bytes())
            sender.header_work = None
            sender.receive = next(
                (each for each in self._waiting if source in each.sources and each.tag == sender.tag), None
            )
            if sender.receive is not None:
                self._waiting.remove(sender.receive)
            fits = sender.receive is not None and sender.receive.buffer.nbytes == nbytes
            sender.payload = sender.receive.buffer if fits and sender.receive else Buffer.allocate(nbytes, DType.UINT8)
            if nbytes:
                sender.payload_work = self._communicator.recv(sender.payload, source=source)
            else:
                self._arrived(source)

    def _arrived(self, source: int) -> None:
        sender = self._senders[source]
        payload, receive = sender.payload, sender.receive
        assert payload is not None, "a payload has arrived"
        sender.payload = sender.payload_work = sender.receive = None
        if receive is None:
            sender.early.setdefault(sender.tag, deque()).append(payload)
        else:
            self._deliver(receive, source, payload)

    def _deliver(self, receive: PendingReceive, source: int, payload: Buffer) -> None:
        if payload.nbytes != receive.buffer.nbytes:
            receive.error = MismatchError(
                f"recv on rank {self._communicator.rank} asked rank {source} for {receive.buffer.nbytes} bytes with "
                f"tag {receive.tag}, but the message has {payload.nbytes} bytes. The message is lost."
            )
        else:
            copy(payload, receive.buffer)
        receive.sender = source
        receive.is_done = True

    def _fail(self, receive: PendingReceive, error: BaseException) -> None:
        if receive in self._waiting:
            self._waiting.remove(receive)
        if not receive.is_done:
            receive.error = error
            receive.is_done = True


class GroupReceiveWork(Work):
    """Waits for a received message, as a communicator's work.

    Args:
        messages: of the group.
        receive: the message.
        limit: longest wait by default.
    """

    def __init__(self, messages: GroupMessages, receive: PendingReceive, limit: timedelta) -> None:
        self.receive = receive
        self._messages = messages
        self._limit = limit

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when the message is there, or raise."""
        self._messages.wait(self.receive, self._limit if timeout is None else timeout)

    def done(self) -> bool:
        """Return whether `wait` would return or raise at once."""
        return self._messages.advance(self.receive)
