"""Named operations on Horovod, which agrees on names itself: each is passed on as it comes."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from typing_extensions import override

from unidist.buffer import Buffer
from unidist.errors import DuplicateNameError, MismatchError, PeerLostError, UsageError
from unidist.negotiation.named import NamedHandle, NamedOperations, NegotiationOptions
from unidist.negotiation.request import Request, Signature
from unidist_horovod.bindings.interface import WORLD_SET, OperationFailed
from unidist_horovod.engine.links import PacketKind
from unidist_horovod.engine.requests import Outcome, start
from unidist_horovod.engine.works import HorovodWork

if TYPE_CHECKING:
    from unidist_horovod.engine.group import HorovodGroup

_ALIVE_EVERY_SEC = 1.0


class HorovodHandle(NamedHandle):
    """A named operation that Horovod was given."""

    def __init__(self, owner: HorovodNamedOperations, request: Request, work: HorovodWork, outcome: Outcome) -> None:
        self.request = request
        self._owner = owner
        self._work = work
        self._outcome = outcome
        self._submitted = time.monotonic()
        self._lock = threading.Lock()
        self._complete = False
        self._error: BaseException | None = None

    @override
    def done(self) -> bool:
        return self._complete or self._work.done()

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        with self._lock:
            if not self._complete:
                limit = self._owner.timeout - timedelta(seconds=time.monotonic() - self._submitted)
                if timeout is not None:
                    limit = min(limit, timeout)
                try:
                    self._work.wait(max(limit, timedelta(0)))
                except BaseException as exc:
                    self._error = exc
                self._complete = True
                self._owner.ended(self, self._submitted, self._error)
        if self._error is not None:
            raise self._error

    @property
    @override
    def result(self) -> Buffer:
        self._check_ended()
        return self._outcome.output

    @property
    @override
    def rows(self) -> tuple[int, ...]:
        self._check_ended()
        return self._outcome.rows

    def _check_ended(self) -> None:
        if not self._complete:
            raise UsageError(
                f"{self.request.kind} {self.request.name!r} is under way; call wait() before reading its result"
            )
        if self._error is not None:
            raise self._error


class HorovodNamedOperations(NamedOperations):
    """Named operations that Horovod itself negotiates.

    Fusion, cycle time and stall reports are Horovod's own, as they were set when it started.
    While a rank has joined, Horovod takes zeros from it for every all-reduce, maxima, minima and products included.

    Args:
        communicator: used by this object alone, and closed with it.
        options: timeline and failure callback.
    """

    def __init__(self, communicator: HorovodGroup, options: NegotiationOptions) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self.timeout = communicator.timeout
        self._communicator = communicator
        self._recorder = options.recorder
        self._on_failure = options.on_failure
        self._lock = threading.Lock()
        self._pending: dict[str, HorovodHandle] = {}
        self._checked: dict[str, Signature] = {}
        self._failure: BaseException | None = None
        self._closed = False
        self._uses: dict[str, int] = {}
        self._alive_at = time.monotonic()

    @override
    def submit(self, request: Request, *, background: bool = False) -> HorovodHandle:
        """Submit a request; Horovod's own thread moves it, in the background or not."""
        name, communicator = request.name, self._communicator
        if self._checked.get(name) != request.signature:
            request.check(self.rank, self.size)
        with self._lock:
            if self._closed:
                raise UsageError(f"the named operations of rank {self.rank} are closed")
            if self._failure is not None:
                raise self._failure
            earlier = self._pending.get(name)
            if earlier is not None and not earlier.done():
                raise DuplicateNameError(
                    f"{request.kind} {name!r} was submitted on rank {self.rank} while an operation of that name is "
                    "under way. Wait for its handle first, or use another name."
                )
            what = f"{request.kind} {name!r}"
            communicator.check_alive(what)  # what peers said meanwhile is heard while waiting: this is the hot path
            try:
                pendings, outcome = start(communicator, request, f"{name}@{communicator.name}")
            except OperationFailed as exc:
                raise communicator.translated(what, exc) from None
            self._checked[name] = request.signature
            use = self._uses[name] = self._uses.get(name, 0) + 1
            number = zlib.crc32(name.encode(), use)  # of this use of the name, the same on all ranks
            handle = HorovodHandle(
                self, request, HorovodWork(communicator, what, number, pendings, outcome.finish), outcome
            )
            self._pending[name] = handle
            now = time.monotonic()
            if now - self._alive_at > _ALIVE_EVERY_SEC:  # for ranks that have joined: the others go on
                self._alive_at = now
                communicator.tell(PacketKind.ACTIVE)
        return handle

    @override
    def join(self, serve: Callable[[str], None]) -> int:
        """Join; Horovod serves every operation by itself, so `serve` is not called."""
        communicator = self._communicator
        if communicator.process_set != WORLD_SET:
            raise UsageError(f"join: Horovod joins all ranks of a job, not a part ({communicator.description})")
        communicator.check_issue("join")
        try:
            pending = communicator.process.binding.join()
        except OperationFailed as exc:
            raise communicator.translated("join", exc) from None
        activity = communicator.mailbox.activity
        while True:
            # A part of the time at a time: others that go on submitting say so, and the wait begins again.
            work = HorovodWork(communicator, "join", -1, [pending], patient=True)
            try:
                work.wait(self.timeout)
                break
            except TimeoutError:
                if communicator.mailbox.activity == activity:
                    raise communicator.stalled_error("join", (), self.timeout) from None
                activity = communicator.mailbox.activity
        last = int.from_bytes(pending.output.bytes()[:4], "little", signed=True)
        return communicator.members.index(last)

    @override
    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            unfinished = [name for name, handle in self._pending.items() if not handle.done()]
            self._pending.clear()
        if unfinished:
            names = ", ".join(map(repr, unfinished))
            self._communicator.abort(f"it closed its named operations while some were under way: {names}")
        self._communicator.close()

    def ended(self, handle: HorovodHandle, submitted: float, error: BaseException | None) -> None:
        """Take note of the end of an operation; for handles."""
        name = handle.request.name
        if self._recorder.timeline is not None:
            event = str(handle.request.kind).upper()
            self._recorder.timeline.record("exchange", event, int(submitted * 1e9), time.monotonic_ns(), tensor=name)
        with self._lock:
            if self._pending.get(name) is handle:
                del self._pending[name]
            fails = error is not None and not isinstance(error, MismatchError) and self._failure is None
            if fails and not self._closed:
                self._failure = error
        if fails and isinstance(error, PeerLostError) and self._on_failure is not None:
            self._on_failure(error)
