"""An operation of a process group under way: waiting for it, and translating torch.distributed's errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from unidist.communicator import Work
from unidist.errors import PeerLostError, StalledError, UsageError

if TYPE_CHECKING:
    from unidist_torch.engines.process_group import ProcessGroupCommunicator

_SLICE_SEC = 0.25
_FIRST_PROBE_SEC = 2.0  # the next after twice as long, and so on: each leaves a few bytes behind in the group
_LOST_SEC = 3.0  # a collective that still waits so long after a connection was lost needs that rank,
_LEFT_SEC = 60.0  # or so long, if a rank that is through with it may have left before others have begun


class Translation:
    """Turns torch.distributed's RuntimeErrors into PeerLostError or StalledError, told apart by the time waited."""

    def __init__(self, communicator: ProcessGroupCommunicator, what: str, timeout: timedelta, peer: int | None) -> None:
        self._communicator = communicator
        self._what = what
        self._timeout = timeout
        self._peer = peer

    def __enter__(self) -> None:
        self._begin = time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, UsageError | PeerLostError):
            return
        if is_of_device(error):
            return
        communicator = self._communicator
        where = f"{self._what} on rank {communicator.rank} ({communicator.description})"
        ranks = () if self._peer is None else (self._peer,)
        reason = communicator._aborted
        communicator._aborted = reason or f"after a failed {self._what}"
        if reason:
            raise PeerLostError(f"{where}: this communicator was aborted: {reason}", ranks=ranks) from error
        if time.monotonic() - self._begin >= 0.95 * self._timeout.total_seconds():
            who = f"rank {self._peer}" if self._peer is not None else "some of the ranks"
            raise StalledError(
                f"{where}: {who} did not come within {self._timeout.total_seconds():g} s. They are alive, but do "
                "something else: look where they are.",
                ranks=ranks,
            ) from error
        raise PeerLostError(f"{where}: a peer died, left or aborted: {error}", ranks=ranks) from error


def is_of_device(error: BaseException) -> bool:
    """Return whether an error is one of this rank's device, and no peer's doing: an index out of range in a kernel."""
    if isinstance(error, torch.OutOfMemoryError | getattr(torch, "AcceleratorError", torch.OutOfMemoryError)):
        return True
    return str(error).startswith(("CUDA error", "HIP error"))  # before PyTorch 2.8


class _Abandoned:
    """Stands for work that can never be completed."""

    def wait(self, timeout: timedelta | None = None) -> None:
        raise RuntimeError("its communicator is closed")

    def is_completed(self) -> bool:
        return True


class GroupWork(Work):
    """Operations that were started in a process group, waited for together.

    Args:
        communicator: whose they are.
        what: the operation, for messages.
        works: torch's.
        finish: called when all of them are complete.
        peer: the other rank, if this is a message.
        may_leave: a rank may be through with this collective, and leave, before others have begun it.
    """

    def __init__(
        self,
        communicator: ProcessGroupCommunicator,
        what: str,
        works: list[Any],
        finish: Callable[[], None] | None,
        peer: int | None,
        *,
        may_leave: bool,
    ) -> None:
        self._communicator = communicator
        self._what = what
        self._works = works
        self._finish = finish
        self._peer = peer
        self._may_leave = may_leave
        self._waiter: threading.Thread | None = None
        self._failure: RuntimeError | None = None

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        limit = self._communicator.timeout if timeout is None else timeout
        with self._communicator._translated(self._what, limit, self._peer):
            if self._peer is not None and not self._communicator.polls_messages:
                self._wait_for_message(self._peer, limit)
            while self._works:
                if self._peer is None and self._communicator.waits_in_slices:
                    self._wait_in_slices(self._works[0], limit)
                else:
                    self._works[0].wait(limit)
                self._works.pop(0)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def abandon(self) -> None:
        """Give back the backend's objects: the communicator was aborted, and is being closed.

        They have threads. Whoever holds this work (a traceback, say) would hold those too, until Python's collector
        ends them, possibly in a forked child, in which they do not run.
        """
        if self._works and (self._waiter is None or not self._waiter.is_alive()):
            self._works = [_Abandoned()]

    def _wait_in_slices(self, work: Any, limit: timedelta) -> None:
        """Wait so that an abort or a lost connection ends it, even if the other end is silent and no error arrives."""
        communicator = self._communicator
        begin = time.monotonic()
        deadline, probe_at, lost_at = begin + limit.total_seconds(), begin + _FIRST_PROBE_SEC, float("inf")
        while True:
            now = time.monotonic()
            remaining = deadline - now
            try:
                work.wait(timedelta(seconds=max(0.001, min(_SLICE_SEC, remaining))))
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # at once: it failed, or was completed just after this slice had ended
                    return
                if remaining <= 0:
                    raise
                if communicator._aborted:
                    communicator._abandoned = True
                    raise
                if now >= probe_at:  # gloo may not report a connection that was lost in the middle of a transfer
                    probe_at = now + (now - begin)
                    if communicator.lost_peers():
                        lost_at = min(lost_at, now)
                if now >= lost_at + (_LEFT_SEC if self._may_leave else _LOST_SEC):
                    communicator._abandoned = True
                    raise RuntimeError(f"the connection to rank {communicator.lost_peers()[0]} is lost") from None

    @override
    def done(self) -> bool:
        if self._peer is None or self._communicator.polls_messages or not self._works:
            return all(work.is_completed() for work in self._works)
        return not self._wait_aside(self._communicator.timeout).is_alive()

    def _wait_for_message(self, peer: int, limit: timedelta) -> None:
        """Wait so that an abort ends it, and a lost connection, even one that the backend does not report."""
        if not self._works:
            return
        communicator = self._communicator
        begin = time.monotonic()
        deadline, probe_at = begin + limit.total_seconds(), begin + _FIRST_PROBE_SEC
        waiter = self._wait_aside(limit + timedelta(seconds=_SLICE_SEC))
        while True:
            now = time.monotonic()
            waiter.join(max(0.0, min(_SLICE_SEC, deadline - now)))
            if not waiter.is_alive():
                break
            if communicator._aborted:
                raise RuntimeError("a message was under way")
            if now >= deadline:
                communicator.break_connections()
                raise RuntimeError(f"the message did not move within {limit.total_seconds():g} s")
            if now >= probe_at:
                communicator.probe(peer)
                probe_at = now + (now - begin)
        self._works.clear()
        if self._failure is not None:
            raise self._failure

    def _wait_aside(self, limit: timedelta) -> threading.Thread:
        """Return the thread that waits for the message: a wait in the backend cannot be interrupted."""
        if self._waiter is None:
            work = self._works[0]

            def wait() -> None:
                try:
                    work.wait(limit)
                except RuntimeError as exc:
                    self._failure = exc

            self._waiter = threading.Thread(target=wait, name=f"unidist {self._what}", daemon=True)
            self._waiter.start()
        return self._waiter
