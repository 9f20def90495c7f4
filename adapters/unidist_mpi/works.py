"""Operations under way, and waiting for them with a deadline, which MPI lacks."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from mpi4py import MPI
from typing_extensions import override

from unidist.buffer import Buffer
from unidist.communicator import Work
from unidist_mpi.collectives import Steps

if TYPE_CHECKING:
    from unidist_mpi.communicator import MpiCommunicator

_LOOK_EVERY = 16
_YIELD_SEC = 0.02
"""After this much of giving way to other processes, a wait begins to sleep."""
_MAX_NAP_SEC = 1e-3
_ARRIVED_SEC = 0.1
"""A rank that waits longer than this tells its peers that it has arrived, so that they know who is missing."""
_GRACE_SEC = 0.5
"""For messages of a peer that has closed its side: what it sent before is still on its way."""


class MpiOperation:
    """Something under way on one communicator.

    Args:
        what: in words, for messages.
        buffers: the memory that it uses, kept alive with it.
        steps: what is to be done; None for messages, which others move on.
        number: of a collective, the same on all ranks; -1 for messages.
        peer: the rank at the other end of a message.

    Attributes:
        complete: it has ended, well or with `error`.
    """

    def __init__(
        self, what: str, buffers: tuple[Buffer, ...], steps: Steps | None = None, *, number: int = -1, peer: int = -1
    ) -> None:
        self.what = what
        self.number = number
        self.peer = peer
        self.complete = False
        self.error: Exception | None = None
        self._buffers = buffers
        self._steps = steps
        self._requests: list[MPI.Request] = []

    def advance(self) -> bool:
        """Go on as far as is possible without waiting; returns whether it is complete."""
        assert self._steps is not None
        while self._requests_done():
            following = next(self._steps, None)
            if following is None:
                self.end()
                return True
            self._requests = following
        return False

    def end(self, error: Exception | None = None) -> None:
        """End the operation."""
        self.error = error
        self._buffers = ()
        self._steps = None
        self.complete = True

    def keep(self, buffer: Buffer) -> None:
        """Keep more memory alive."""
        self._buffers = (*self._buffers, buffer)

    def _requests_done(self) -> bool:
        if len(self._requests) == 1:
            return self._requests[0].Test()
        return not self._requests or MPI.Request.Testall(self._requests)


class MpiWork(Work):
    """An operation of a communicator, for its caller."""

    def __init__(self, communicator: MpiCommunicator, operation: MpiOperation) -> None:
        self._communicator = communicator
        self._operation = operation

    @override
    def done(self) -> bool:
        if not self._operation.complete:
            self._communicator.process.drive()
        return self._operation.complete or self._communicator.is_broken

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        operation = self._operation
        if not operation.complete:
            try:
                self._wait(self._communicator.timeout if timeout is None else timeout)
            finally:
                self._communicator.end_waiting()
        if operation.error is not None:
            raise operation.error

    def _wait(self, limit: timedelta) -> None:
        communicator, operation = self._communicator, self._operation
        begin = time.monotonic()
        told = False
        left_at = 0.0
        while True:
            for _ in range(_LOOK_EVERY):
                communicator.advance()
                if operation.complete:
                    return
            communicator.process.drive()
            if operation.complete:
                return
            communicator.check_alive(operation.what)
            now = time.monotonic()
            if not told and operation.number >= 0 and now - begin > _ARRIVED_SEC:
                told = True
                communicator.tell_arrival(operation.number)
            left = communicator.left(operation)
            if left:
                left_at = left_at or now
                if now - left_at > _GRACE_SEC:
                    raise communicator.left_error(operation.what, left)
            if now - begin > limit.total_seconds():
                raise communicator.stalled_error(operation, limit)
            _give_way(now - begin)


def _give_way(waited: float) -> None:
    """Let other processes run; long waits sleep, ever longer."""
    if waited < _YIELD_SEC:
        os.sched_yield()
    else:
        time.sleep(min(_MAX_NAP_SEC, waited * 1e-3))
