"""Drives the agreement and the execution of named operations on one rank.

Who drives. The ranks work in cycles: each rank sends one block to all, applies what it got to its tables
(`_agreement.py`), and runs what became ready. A rank takes part in cycles while one of its operations
is pending, and otherwise does nothing; a peer's cycle then waits for it inside the engine. Exactly one thread
at a time drives: the thread that waits for an operation, so that a synchronous call never pays for a
switch of threads, or, for operations submitted with `background=True`, a thread started when first needed.

Locking, and why no wake-up is lost and nothing deadlocks:
- One mutex guards all that several threads touch: `_pending`, `_new`, `_driving`, `_pausing`, `_failure`, and
  the waiting table while it changes. It is never held during an exchange, an operation, a callback or a join.
- `_driving` is a role, not a lock. It is taken and given back under the mutex; giving it back notifies
  `_changed` on which all wait that want an operation to end or the role to be free. They test both under
  the mutex, so a change comes before their test, or its notification comes after they went to sleep.
- The thread that has the role drives until its own operation is done, then gives it back though others
  may be pending: each of those has a waiter, or the background thread, which was notified, takes over. An
  operation with neither (submitted in the foreground, not yet waited for) moves when somebody waits.
- A driver pauses only after a cycle that brought nothing, on `_submitted`, after testing `_new` under the
  mutex; `submit` adds to `_new` and notifies under the same mutex.
- The first failure is stored under the mutex together with the end of every pending handle; later ones
  change nothing. The communicator is aborted after that, which makes a driver blocked in it come back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from math import prod

from typing_extensions import override

from unidist.buffer import HOST
from unidist.communicator import Communicator, ReportsArrivals, Work
from unidist.errors import DuplicateNameError, MismatchError, PeerLostError, StalledError, UsageError
from unidist.negotiation._agreement import Agreement, CycleMessage, Ready
from unidist.negotiation._carried import CycleBlocks
from unidist.negotiation._execution import Execution, Operation
from unidist.negotiation._inspection import Snapshot, StallInspector
from unidist.negotiation._stall import Situation
from unidist.negotiation._watchdog import Watchdog
from unidist.negotiation._wire import decode_block, decode_requests
from unidist.negotiation.handle import Handle
from unidist.negotiation.named import NamedOperations, NegotiationOptions
from unidist.negotiation.request import OperationKind, Request
from unidist.observation import running

_JOIN_NAME = "<join>"
_SHORTEST_PAUSE_SECONDS = 50e-6
_UNOBSERVED = nullcontext()
_SHORT_WAIT_SECONDS = 0.02
"""Ranks that have not come to an exchange after this are called absent; until then they are on their way."""


class _Change(threading.Condition):
    """A condition that knows, under its mutex, how many threads wait: to notify none takes time, and is common."""

    num_waiting = 0

    @override
    def wait(self, timeout: float | None = None) -> bool:
        self.num_waiting += 1
        try:
            return super().wait(timeout)
        finally:
            self.num_waiting -= 1


class Negotiator(NamedOperations):
    """Matches named operations over the ranks of a communicator. Thread-safe.

    Every rank creates one over the same group, with equal arguments.

    Args:
        communicator: used by this negotiator alone, and closed with it.
        options: default: those of `NegotiationOptions`. `on_failure` is called by whichever thread drives.
    """

    def __init__(self, communicator: Communicator, options: NegotiationOptions | None = None) -> None:
        options = options or NegotiationOptions()
        self.rank, self.size = communicator.rank, communicator.size
        self._communicator = communicator
        self._recorder = options.recorder
        self._on_failure = options.on_failure
        self._cycle_time_seconds = options.cycle_time.total_seconds()
        self._num_pauses = 0
        shutdown = options.stall_shutdown.total_seconds() or float("inf")
        self._timeout_seconds = min(communicator.timeout.total_seconds(), shutdown)
        self._inspector = StallInspector(
            self._snapshot,
            self._fail,
            stall_check_seconds=options.stall_check.total_seconds() or float("inf"),
            timeout_seconds=self._timeout_seconds,
        )

        # Touched by the driver alone; `waiting` of the agreement changes under the mutex.
        self._blocks = CycleBlocks(communicator)
        self._agreement = Agreement(self.rank, self.size, capacity=options.cache_capacity, room=self._blocks.room)
        self._execution = Execution(
            communicator,
            fusion_threshold_bytes=options.fusion_threshold_bytes,
            recorder=options.recorder,
            devices=options.devices,
        )
        self._devices = options.devices
        self._joining: Handle | None = None
        self._serve: Callable[[str], None] = _serve_nothing
        self._executing: Sequence[Operation] = ()
        self._entered = 0.0  # when the current exchange or execution began
        self._pause_seconds = _SHORTEST_PAUSE_SECONDS

        # Guarded by the mutex.
        self._mutex = threading.Lock()
        self._changed = _Change(self._mutex)
        self._submitted = threading.Condition(self._mutex)
        self._pending: dict[str, Handle] = {}
        self._new: list[Handle] = []
        self._driving = False
        self._pausing = False
        self._num_background = 0
        self._failure: BaseException | None = None
        self._closing = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._watchdog: Watchdog | None = None

    @override
    def submit(self, request: Request, *, background: bool = False) -> Handle:
        """Submit an operation; with `background`, a background thread drives it."""
        if not self._agreement.knows(request):
            request.check(self.rank, self.size)
        handle = Handle(self, request, background=background, timeout_seconds=self._timeout_seconds)
        with self._mutex:
            if self._failure is not None:
                raise self._failure
            if request.name in self._pending:
                raise DuplicateNameError(
                    f"{request.kind} {request.name!r} was submitted on rank {self.rank} while an operation of that "
                    "name is under way. Wait for its handle first, or use another name."
                )
            self._pending[request.name] = handle
            self._new.append(handle)
            if self._pausing:
                self._submitted.notify()
            if self._watchdog is None:
                self._watchdog = Watchdog(self._inspector.look)
                self._watchdog.start()
            if background:
                self._num_background += 1
                self._wake_background_thread()
        return handle

    @override
    def run(self, request: Request) -> None:
        """Submit an operation and wait; where it is a small known one and the only one, in one exchange at once."""
        block = b""
        with self._mutex:  # while nobody drives, the tables stay as they are
            if not (self._pending or self._driving or self._agreement.waiting or self._failure):
                block = self._agreement.carrying(request)
            if block and self._recorder.timeline is None:
                handle = Handle(self, request, background=False, timeout_seconds=self._timeout_seconds)
                self._pending[request.name] = handle
                self._driving = True
            else:
                handle = None
        if handle is None:
            self.submit(request).wait()
            return
        observed = running(self.observed, handle, request)
        self._drive(handle, block, observed)
        observed.concluded(handle.error)
        if handle.error is not None:
            raise handle.error
        self._recorder.waited_sec += time.monotonic() - handle.submitted

    @override
    def moves(self, memory: str) -> bool:
        return memory == HOST or (self._devices is not None and self._devices.moves(memory))

    @override
    def join(self, serve: Callable[[str], None]) -> int:
        """Join; `serve` is called by the driving thread, which is this one or the background one."""
        if self._joining is not None:
            raise UsageError(f"rank {self.rank} has called join already, from another thread")
        self._serve = serve
        self._joining = handle = self.submit(Request(_JOIN_NAME, OperationKind.JOIN))
        try:
            handle.wait()
        finally:
            self._joining, self._serve = None, _serve_nothing
        return handle.rows[0]

    @override
    def close(self) -> None:
        """Close the negotiator and end its threads."""
        with self._closing:  # a second caller returns when all is closed, as the first one does
            if not self._closed:
                self._close()
                self._closed = True

    def _close(self) -> None:
        with self._mutex:
            unfinished = ", ".join(map(repr, self._pending))
            text = f"rank {self.rank} closed the negotiator while operations were under way: {unfinished}"
            self._end_all(
                PeerLostError(text) if unfinished else UsageError(f"the negotiator of rank {self.rank} is closed")
            )
        if unfinished:
            self._communicator.abort(text)
            self._execution.abort(text)
        if self._watchdog is not None:
            self._watchdog.close()
        if self._thread is not None:
            self._thread.join(timeout=10)
        with self._mutex:  # a driver that waits in the engine comes back soon: it was aborted
            self._changed.wait_for(lambda: not self._driving, timeout=10)
        self._communicator.close()
        self._execution.close()
        # What still refers to this object, a handle for instance, shall not hold engine memory.
        del self._blocks, self._execution

    # Waiting and driving

    def drive_until(self, handle: Handle, timeout: timedelta | None) -> None:
        """Return when `handle` is done, driving cycles whenever no other thread does. For `Handle.wait`."""
        began = time.monotonic()
        if timeout is not None:
            handle.deadline = min(handle.deadline, time.monotonic() + timeout.total_seconds())
            assert self._watchdog is not None, "started by submit"
            self._watchdog.wake_by(handle.deadline)
        with self._mutex:
            while self._driving and not handle.ended:
                # The watchdog ends the handle at its deadline and notifies; the limit here is for our own bugs.
                self._changed.wait(min(self._timeout_seconds + 60, threading.TIMEOUT_MAX))
            must_drive = not handle.ended
            self._driving = self._driving or must_drive
        if must_drive:
            self._drive(handle)
        self._recorder.waited_sec += time.monotonic() - began

    def _drive(
        self, handle: Handle | None, block: bytes = b"", observed: AbstractContextManager[None] = _UNOBSERVED
    ) -> None:
        """Run cycles until the operation has ended; None: until all background ones have.

        The caller has taken the role, and it is given back here.

        Args:
            handle: of the operation.
            block: announces it with its data in a first cycle, if it is the only one, and settled.
            observed: keeps record of the call, where it takes long.
        """
        started: bool | Work = False
        try:
            if block and handle is not None:
                self._entered = handle.submitted
                started = self._blocks.start(block, handle.request)
                if started is True:
                    self._complete([handle])
                    return
            with observed:
                if block and handle is not None:
                    blocks = self._blocks.finish(started, block, handle.request)
                    if blocks is None:
                        self._complete([handle])
                    else:
                        self._apply(*self._agree(blocks, self._agreement.announce([handle.request])))
                while self._num_background if handle is None else not handle.ended:
                    if not self._cycle():
                        self._pause()
        except StalledError as exc:
            self._fail(self._inspector.error(exc))
        except Exception as exc:
            if names := ", ".join(map(repr, list(self._pending))):
                exc.add_note(f"rank {self.rank} was in named operations: {names}")
            self._fail(exc)
        except BaseException as exc:  # an interrupt in the middle of a cycle: the peers cannot be left waiting
            self._fail(PeerLostError(f"rank {self.rank} was interrupted by {type(exc).__name__} in an operation"))
            raise
        finally:
            with self._mutex:
                self._driving = False
                if self._changed.num_waiting:
                    self._changed.notify_all()

    def _drive_in_background(self) -> None:
        while True:
            with self._mutex:
                while self._failure is None and (self._driving or not self._num_background):
                    self._changed.wait()  # idle, not waiting for a peer; `close` and every failure notify
                if self._failure is not None:
                    return
                self._driving = True
            self._drive(None)

    def _wake_background_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._drive_in_background, name="unidist-negotiator", daemon=True)
            self._thread.start()
        else:
            self._changed.notify_all()

    @property
    @override
    def num_pauses(self) -> int:
        return self._num_pauses

    @property
    @override
    def cycle_time(self) -> timedelta:
        return timedelta(seconds=self._cycle_time_seconds)

    @override
    def set_cycle_time(self, cycle_time: timedelta) -> None:
        self._cycle_time_seconds = cycle_time.total_seconds()

    def _pause(self) -> None:
        """Wait a little, longer each time, or until something is submitted here: the ranks disagree on what is next."""
        self._num_pauses += 1
        with self._mutex:
            if not self._new and self._failure is None:
                self._pausing = True
                self._submitted.wait(min(self._pause_seconds, self._cycle_time_seconds))
                self._pausing = False
        self._pause_seconds = min(2 * self._pause_seconds, self._cycle_time_seconds)

    # One cycle

    def _cycle(self) -> bool:
        """Take part in one cycle; return False if no rank had anything new to say."""
        with self._mutex:
            if self._failure is not None:
                raise self._failure
            new, self._new = self._new, []
        announcement = self._agreement.announce([handle.request for handle in new])
        if announcement.num_requests < len(new):
            with self._mutex:
                self._new[:0] = new[announcement.num_requests :]
        is_settled = not (announcement.requests or self._agreement.waiting)  # nothing is half agreed
        carried = new[0] if announcement.carrying and is_settled and self._recorder.timeline is None else None
        block = announcement.block if carried is None else announcement.carrying
        if self._recorder.mark_cycles and self._recorder.timeline is not None:
            now = time.monotonic_ns()
            self._recorder.timeline.record("cycles", "CYCLE_START", now, now)
        self._entered = time.monotonic()
        blocks = self._blocks.exchange(block, None if carried is None else carried.request)
        if blocks is None and is_settled:
            # The steady state: every rank announced the same known operations.
            operations: list[Operation] = list(zip(new, announcement.known, strict=False))
            if carried is not None:
                self._complete(new)
                operations.clear()
            return self._apply(operations, bool(new))
        return self._apply(*self._agree(blocks or [block] * self.size, announcement))

    def _apply(self, operations: Sequence[Operation], progress: bool) -> bool:
        """Run what became ready in a cycle; returns whether any rank had anything new to say."""
        if operations:
            self._run(operations)
        if progress:
            self._pause_seconds = _SHORTEST_PAUSE_SECONDS
        return progress

    def _agree(self, blocks: Sequence[bytes], announcement: CycleMessage) -> tuple[list[Operation], bool]:
        """Update the tables with what the ranks announced; return what became ready, and whether anything was new."""
        decoded = list(map(decode_block, blocks))
        ids = [each for each, _ in decoded]
        sizes = [nbytes for _, nbytes in decoded]
        requests = [decode_requests(data) for data in self._exchange_requests(announcement.requests, sizes)]
        with self._mutex:
            ready = self._agreement.update(ids, requests)
            if self._failure is not None:
                raise self._failure
            operations: list[tuple[Handle | None, Ready]] = []
            for operation in ready:
                handle = self._pending.get(operation.name)
                if handle is None:  # this rank has joined
                    if not operation.mismatch:
                        if self._joining is not None:
                            self._joining.renew(time.monotonic(), self._timeout_seconds)
                        operations.append((None, operation))
                elif operation.mismatch:
                    self._finish(handle, MismatchError(operation.mismatch))
                    self._changed.notify_all()
                else:
                    operations.append((handle, operation))
        # Before anything runs, and in the order that all ranks agreed on: connecting is collective.
        for _, operation in operations:
            self._execution.connect(operation.signatures[self.rank].memory)
        running = [(handle or self._stand_in(operation), operation) for handle, operation in operations]
        return running, any(ids) or any(sizes)

    def _stand_in(self, operation: Ready) -> Handle:
        """Return a request of zeros for an operation of the other ranks."""
        signature = operation.signatures[self.rank]
        zeros = self._execution.allocate(signature.memory, prod(signature.shape), signature.dtype)
        if signature.kind is OperationKind.BARRIER:
            request = Request(operation.name, signature.kind)
        else:
            request = Request(
                *(operation.name, signature.kind, zeros, zeros, signature.shape, signature.op),
                scale=signature.scale,
                prescale=signature.prescale,
            )
        return Handle(self, request, background=False, timeout_seconds=self._timeout_seconds)

    def _exchange_requests(self, own: bytes, sizes: Sequence[int]) -> list[bytes]:
        """Return the requests in full of every rank, of the given sizes in bytes. All ranks know the sizes."""
        largest = max(sizes)
        if not largest:
            return [b""] * self.size
        buffer = self._communicator.allocate(largest * (1 + self.size))
        source, target = buffer.slice(0, largest), buffer.slice(largest, largest * self.size)
        source.bytes()[: len(own)] = own
        self._communicator.allgather(source, target).wait()
        data = target.bytes().tobytes()
        return [data[rank * largest : rank * largest + size] for rank, size in enumerate(sizes)]

    def _run(self, operations: Sequence[Operation]) -> None:
        timeline = self._recorder.timeline
        if timeline is not None and self._recorder.per_tensor:
            now = time.monotonic_ns()
            for handle, _ in operations:
                event = f"NEGOTIATE_{handle.request.kind.upper()}"
                timeline.record("exchange", event, int(handle.submitted * 1e9), now, tensor=handle.request.row)
        self._executing = operations
        self._entered = time.monotonic()
        for completed in self._execution.run(operations):
            self._complete([handle for handle, _ in completed])
        self._executing = ()

    def _complete(self, handles: Sequence[Handle]) -> None:
        """End the handles of operations that were run."""
        stood_in = []
        with self._mutex:
            for handle in handles:
                if self._pending.get(handle.request.name) is handle:
                    self._finish(handle)
                elif not handle.ended:
                    stood_in.append(handle.request.name)
            if self._changed.num_waiting:
                self._changed.notify_all()
        for name in stood_in:
            self._serve(name)

    def _finish(self, handle: Handle, error: BaseException | None = None) -> None:
        """End a handle; the mutex is held, and the caller notifies. Its name is free before it is seen to be done."""
        del self._pending[handle.request.name]
        self._num_background -= handle.background
        handle.error = error
        handle.ended = True

    def _fail(self, error: BaseException) -> None:
        """End every operation with `error` and abort the communicator, unless a failure came before."""
        with self._mutex:
            first = self._failure is None
            self._end_all(error)
        if first:
            self._communicator.abort(str(error))
            self._execution.abort(str(error))
            if self._on_failure is not None:
                self._on_failure(error)

    def _end_all(self, error: BaseException) -> None:
        """End every pending operation, and all later ones, with the first error; the mutex is held."""
        if self._failure is None:
            self._failure = error
            for handle in list(self._pending.values()):
                self._finish(handle, error)
            self._new.clear()
            self._changed.notify_all()
            self._submitted.notify_all()

    def _snapshot(self) -> Snapshot:
        """Return the pending operations and what is known of the other ranks'. From any thread."""
        communicator, absent = self._communicator, frozenset[int]()
        in_it_for = time.monotonic() - self._entered
        # While the ranks go on with cycles, each is absent from the current one for a moment.
        if isinstance(communicator, ReportsArrivals) and in_it_for > _SHORT_WAIT_SECONDS + 2 * self._cycle_time_seconds:
            absent = frozenset(communicator.waiting_for())
        with self._mutex:
            waiting = {name: frozenset(submitted) for name, submitted in self._agreement.waiting.items()}
            handles = list(self._pending.values())
        executing = frozenset(handle.request.name for handle, _ in self._executing)
        joined = frozenset(self._agreement.joined)
        return handles, Situation(self.rank, self.size, waiting, absent, executing, joined)


def _serve_nothing(name: str) -> None:
    """Take no part in anything: what a rank does that has not joined."""
