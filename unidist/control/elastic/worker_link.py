"""A worker's connection to the coordinator of an elastic job, and the thread that listens on it.

The thread sends heartbeats, so that a stalled process is noticed, and learns at once when a generation ends, whatever
the script is doing at that moment.

If the coordinator may come back (`orphan_timeout`), a lost connection is re-established without the script noticing:
training continues, and a rank that waits for the next world keeps waiting. The first message repeats what may have been
lost; `unidist.control.elastic.resumable_coordinator` says how.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from unidist.control.client import connect
from unidist.control.codec import Message, WireError
from unidist.control.connection import Address, Connection, ConnectionLost, format_address
from unidist.control.elastic.step_times import StepTimer
from unidist.control.messages import (
    Assign,
    Change,
    Detached,
    Dismissed,
    Failed,
    Happened,
    Leaving,
    Ready,
    Standby,
    StateLost,
    Welcome,
    WorkerBeat,
    WorkerHere,
    WorldEnded,
)
from unidist.errors import ConfigurationError, PeerLostError, StalledError
from unidist.topology import Topology

_log = logging.getLogger("unidist.elastic")

M = TypeVar("M", bound=Message)

_GOODBYE_SEC = 1.0
_RETRY_SEC = 0.2
_ATTEMPT_SEC = 10.0


class DismissedError(PeerLostError):
    """The coordinator has let this worker go: it was asked to leave, or there is no place for it any more."""


@dataclass(frozen=True)
class Assignment:
    """A worker's place in a generation.

    Args:
        generation: its number.
        topology: the place.
        progress: commits that the state of rank 0 has seen.
        needs_sync: not all members hold that state.
    """

    generation: int
    topology: Topology
    progress: int
    needs_sync: bool


class WorkerLink:
    """The connection of one worker. All methods but `close` are for the script's thread.

    Args:
        address: of the coordinator.
        secret: the job's secret.
        worker: this worker's number.
        timeout: longest time for connecting.
        on_ended: called by the link's own thread when the present generation ends, with the reason.
        on_change: called by it when the coordinator asks for a change of the generation whose number it gets.
        orphan_timeout: time for which to try to reach a lost coordinator before the job is given up.

    Attributes:
        is_first: this worker is to be in the first world of the job.
        change_is_wanted: the coordinator asks the members to come back at their next commit.
        others_join: there are ranks that will join then, `some_leave` ones that will not be there any more.
        leaving_workers: those that will not be in the next generation, as far as this worker knows.
        step_timer: measures the training's steps; beats report it.
        is_waiting: says whether this rank waits for others now; beats report it.

    Raises:
        PeerLostError: the coordinator cannot be reached.
        ConfigurationError: it does not await this worker.
    """

    def __init__(
        self,
        address: Address,
        secret: bytes,
        worker: int,
        *,
        timeout: timedelta,
        on_ended: Callable[[str], None],
        on_change: Callable[[int], None] = lambda generation: None,
        orphan_timeout: timedelta = timedelta(0),
    ) -> None:
        self.worker = worker
        self._address, self._secret = address, secret
        self._orphan_sec = orphan_timeout.total_seconds()
        self.change_is_wanted = self.others_join = self.some_leave = False
        self.leaving_workers: frozenset[int] = frozenset()
        self.step_timer = StepTimer()
        self.is_waiting: Callable[[], bool] = lambda: False
        self._where = f"the job's coordinator at {format_address(address)}"
        self._on_ended, self._on_change = on_ended, on_change
        self._steps = 0
        self._generation = -1
        self._ended = ""
        self._lost = ""
        self._unanswered: Ready | None = None  # it waits for its answer
        self._gives_up = ""
        self._is_leaving = self._is_detached = self._is_welcome = False
        self._outbox: deque[Message] = deque()
        self._inbox: deque[Message] = deque()
        self._arrived = threading.Condition()
        self._closing = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._connection = connect(address, secret, timeout=timeout.total_seconds())
        except (ConnectionLost, WireError, TimeoutError) as exc:
            found = self._look_for_coordinator()
            if found is None:
                self._close_pipe()
                raise PeerLostError(
                    f"worker {worker} cannot use {self._where}: {exc}. Has the launcher ended?"
                ) from exc
            self._connection = found
        self._beat_sec = 1.0
        self._has_news = False
        self._outbox.append(self._introduction())  # before any beat
        self._thread = threading.Thread(target=self._run, name="unidist-worker", daemon=True)
        self._thread.start()
        try:
            welcome = self._receive(Welcome, timeout)
        except BaseException:
            self.close()
            raise
        self.is_first = welcome.is_first
        self._beat_sec = welcome.beat_sec

    def step(self) -> None:
        """Count a step: the next beat tells that this worker gets on. Costs nothing."""
        self._steps += 1

    def tell(self) -> None:
        """Send a beat now: there is something to tell that another change of the world would take the place of."""
        self._has_news = True
        self._wake()

    def next_world(
        self, progress: int, *, reason: str, timeout: timedelta, patience: timedelta | None = None
    ) -> Assignment:
        """Wait for the next generation that takes this worker in, and return its place there.

        Args:
            progress: commits that the state of this worker has seen; -1: it has none.
            reason: why it cannot continue in the present generation; "" if the coordinator requested a change.
            timeout: longest wait; there is none while the coordinator has it stand by.
            patience: a rank that does not come back in this time is taken for lost; None: `timeout`.

        Raises:
            DismissedError: there is no place for it.
            PeerLostError: the coordinator is gone.
            StalledError: no generation has formed in time.
        """
        with self._arrived:
            seconds = (patience or timeout).total_seconds()
            self._unanswered = Ready(self._generation, progress, reason, seconds)
            self._outbox.append(self._unanswered)
        self._wake()
        told = self._receive(Assign, timeout)
        return Assignment(told.generation, told.place, told.progress, told.needs_sync)

    def leaving(self) -> None:
        """Ask to be let go at the next commit. Also from a signal handler."""
        self.leaving_workers |= {self.worker}
        with self._arrived:
            self._is_leaving = True
            self._outbox.append(Leaving())
        self._wake()

    def give_up(self, reason: str) -> None:
        """Ask the launcher to end the job: neither a rank nor a new process could continue."""
        with self._arrived:
            self._gives_up = reason
            self._outbox.append(StateLost(reason))
        self._wake()

    def happened(self, event: str, fields: Mapping[str, str | int | float]) -> None:
        """Have the job's log tell of something; not told again where the coordinator is away just then."""
        with self._arrived:
            self._outbox.append(Happened(event, fields))
        self._wake()

    @property
    def generation(self) -> int:
        """The number of the present generation; -1 before the first."""
        return self._generation

    @property
    def ended(self) -> str:
        """Why the present generation has ended; "" while it has not."""
        return self._ended

    def check(self) -> None:
        """Raise PeerLostError if the present generation has ended."""
        if self._ended or self._lost:
            raise PeerLostError(self._ended or self._lost)

    def close(self) -> None:
        """Say goodbye, end the thread and close the connection. Idempotent."""
        if self._closing:
            return
        with self._arrived:
            self._is_detached = True
            self._outbox.append(Detached())
        self._closing = True
        self._wake()
        self._thread.join(_GOODBYE_SEC + 1.0)
        self._connection.close()
        self._close_pipe()

    def forget(self) -> None:
        """Give up the connection in a forked child: held open there, it would hide the end of this process."""
        self._closing = True
        self._connection.close()
        self._close_pipe()

    # The thread

    def _run(self) -> None:
        try:
            self._serve()
            while not self._closing and not self._lost:  # the coordinator is gone
                if self._come_back():
                    self._serve()
        except OSError:
            if not self._closing:
                raise

    def _serve(self) -> None:
        """Send and receive until this end closes or the coordinator is gone."""
        beat_at = time.monotonic() + self._beat_sec  # the introduction says that this worker lives
        try:
            while not self._closing and not self._lost:
                now = time.monotonic()
                if now >= beat_at or self._has_news:
                    self._has_news = False
                    beat_at = now + self._beat_sec
                    self._outbox.append(WorkerBeat(self._steps, self.is_waiting(), self.step_timer.report))
                self._turn(max(0.0, beat_at - now))
            deadline = time.monotonic() + (_GOODBYE_SEC if self._closing else 0.0)
            while (self._outbox or self._connection.pending_bytes) and time.monotonic() < deadline:
                self._turn(0.05)
        except (ConnectionLost, WireError, OSError) as exc:
            if not self._closing and not self._orphan_sec:
                self._lose(f"worker {self.worker} lost {self._where}: {exc}")

    def _turn(self, seconds: float) -> None:
        while self._outbox:
            self._connection.send(self._outbox.popleft())
        poller = select.poll()
        poller.register(self._connection, select.POLLIN | (select.POLLOUT if self._connection.pending_bytes else 0))
        poller.register(self._wake_read, select.POLLIN)
        for descriptor, _ in poller.poll(1000 * seconds):
            if descriptor == self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            else:
                self._connection.flush()
                for message in self._connection.receive():
                    self._take(message)

    def _take(self, message: Message) -> None:
        match message:
            case Welcome() if self._is_welcome:
                return  # it has come back
            case Failed(text=text):
                if not self._is_welcome:
                    self._inbox.append(message)  # the script's thread waits for an answer
                self._lose(text)
            case WorldEnded(generation, text):
                if generation == self._generation and not self._ended:
                    self._end(text)
            case Change(generation, leaving, joining):
                if generation == self._generation:
                    self.leaving_workers |= set(leaving)
                    self.some_leave, self.others_join = bool(leaving), joining
                    self.change_is_wanted = True
                    self._on_change(self._generation)
            case _:
                self._is_welcome = self._is_welcome or isinstance(message, Welcome)
                self._put(message)

    def _put(self, message: Message) -> None:
        """Keep a message for the script's thread."""
        with self._arrived:
            if isinstance(message, Assign):
                # Before the next message is looked at: it may say that this generation has ended already.
                self._generation = message.generation
                self._beat_sec = message.beat_sec
                self._ended = ""
                self.change_is_wanted = False
                self._unanswered = None
            self._inbox.append(message)
            self._arrived.notify_all()

    def _come_back(self) -> bool:
        """Find the coordinator again and tell it how things stand; lose it for good if it does not come back."""
        since = time.monotonic()
        self._connection.close()
        found = self._look_for_coordinator()
        if found is not None:
            with self._arrived:  # what waits to be sent is in the introduction, and must not follow it
                self._connection = found
                self._outbox.clear()
                self._outbox.append(self._introduction())
            _log.info("worker %d found %s again after %.1f s", self.worker, self._where, time.monotonic() - since)
            return True
        if not self._closing:
            self._lose(f"worker {self.worker} lost {self._where}, and did not find it for {self._orphan_sec:g} seconds")
        return False

    def _look_for_coordinator(self) -> Connection | None:
        """Return a new connection; None if there is none within the orphan timeout, or this end closes."""
        deadline = time.monotonic() + self._orphan_sec
        while not self._closing and (remaining := deadline - time.monotonic()) > 0:
            try:
                return connect(self._address, self._secret, timeout=min(_ATTEMPT_SEC, remaining))
            except (ConnectionLost, WireError, TimeoutError):
                self._sleep(_RETRY_SEC)
        return None

    def _sleep(self, seconds: float) -> None:
        """Wait; this end's closing wakes it."""
        if select.select([self._wake_read], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)

    def _introduction(self) -> WorkerHere:
        return WorkerHere(
            self.worker,
            os.getpid(),
            self._generation,
            self._unanswered,
            leaving=self._is_leaving,
            gives_up=self._gives_up,
            detached=self._is_detached,
        )

    def _end(self, text: str) -> None:
        self._ended = text
        self._on_ended(text)

    def _lose(self, text: str) -> None:
        with self._arrived:
            self._lost = text
            self._arrived.notify_all()
        self._end(text)

    # The script's side

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"\0")

    def _receive(self, kind: type[M], timeout: timedelta) -> M:
        message = self._next_message(timeout)
        while isinstance(message, Standby):
            message = self._next_message(None)
        if isinstance(message, Dismissed):
            raise DismissedError(f"worker {self.worker} was let go by {self._where}")
        if isinstance(message, Failed):
            raise ConfigurationError(message.text)
        if not isinstance(message, kind):
            raise PeerLostError(
                f"worker {self.worker}: {self._where} answered {message.type_name!r} instead of {kind.type_name!r}"
            )
        return message

    def _next_message(self, timeout: timedelta | None) -> Message:
        deadline = math.inf if timeout is None else time.monotonic() + timeout.total_seconds()
        with self._arrived:
            while not self._inbox:
                if self._lost:
                    raise PeerLostError(self._lost)
                remaining = deadline - time.monotonic()
                if timeout is not None and remaining <= 0:
                    raise StalledError(
                        f"worker {self.worker} got no answer of {self._where} for {timeout.total_seconds():g} seconds"
                    )
                self._arrived.wait(min(remaining, threading.TIMEOUT_MAX))
            return self._inbox.popleft()

    def _close_pipe(self) -> None:
        os.close(self._wake_read)
        os.close(self._wake_write)


__all__ = ["Assignment", "Connection", "DismissedError", "WorkerLink"]
