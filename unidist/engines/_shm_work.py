"""Pending collectives of the shm engine. Waiting or polling drives them; no thread is needed."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING

from typing_extensions import override

from unidist.buffer import DType
from unidist.communicator import ReduceOp, Work
from unidist.engines import _shm

if TYPE_CHECKING:
    from unidist.engines._shm_communicator import ShmCommunicator

DTYPE_CODES = {DType(name): code for code, name in enumerate(_shm.DTYPES)}
SLICE_NS = 200_000_000
"""Longest time outside of the interpreter."""

OP_CODES = {ReduceOp(name): code for code, name in enumerate(_shm.REDUCE_OPS)}


class Opcode(IntEnum):
    """The collectives, as in `shm_native/group.h`."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    REDUCESCATTER = 3
    ALLTOALL = 4
    BARRIER = 5


class Status(IntEnum):
    """The outcome of a wait, as in `shm_native/group.h`."""

    OK = 0
    PENDING = 1
    TIMEOUT = 2
    LOST = 3
    ABORTED = 4
    CLOSED = 6


def unpack(outcome: int) -> tuple[Status, int]:
    """Return the status and the rank that a negative outcome of the C side stands for."""
    return Status(-outcome % 8), -outcome // 8 - 1


def patiently(outcome: int, attempt: Callable[[int], int], limit_ns: int) -> int:
    """Return the outcome of a wait that goes back to the interpreter now and then: signals are handled there.

    Args:
        outcome: of a first attempt, which has waited for `SLICE_NS` or the limit.
        attempt: waits for so many nanoseconds at most; may be called again after a timeout.
        limit_ns: longest wait altogether.
    """
    end = time.monotonic_ns() + limit_ns - SLICE_NS
    left = limit_ns
    while outcome < 0 and left > SLICE_NS and unpack(outcome)[0] is Status.TIMEOUT:
        left = end - time.monotonic_ns()
        outcome = attempt(max(1, min(left, SLICE_NS)))
    return outcome


def nanoseconds(duration: timedelta) -> int:
    """Return a duration for the C side, where 0 means not to wait at all."""
    return max(1, int(duration.total_seconds() * 1e9))


class CollectiveWork(Work):
    def __init__(self, communicator: ShmCommunicator, number: int, opcode: Opcode) -> None:
        self._communicator = communicator
        self._number = number
        self._opcode = opcode
        self._finished = False

    def wait(self, timeout: timedelta | None = None) -> None:
        if not self._finished:
            communicator = self._communicator
            limit = communicator.timeout_ns if timeout is None else nanoseconds(timeout)
            outcome = communicator.drive(self._number, min(limit, SLICE_NS))
            if outcome:
                outcome = patiently(outcome, lambda limit_ns: communicator.drive(self._number, limit_ns), limit)
            if outcome:
                waited = communicator.timeout if timeout is None else timeout
                communicator.raise_outcome(outcome, self._opcode.name.lower(), waited)
            self._finished = True
        if self._communicator.errors and (error := self._communicator.errors.pop(self._number, None)) is not None:
            raise error

    def done(self) -> bool:
        if not self._finished:
            outcome = self._communicator.drive(self._number, 0)
            if outcome and unpack(outcome)[0] is Status.PENDING:
                return False
            self._finished = outcome == 0  # else wait() raises what is the matter
        return True

    @override
    def poll(self, limit: timedelta) -> bool:
        if not self._finished:
            outcome = self._communicator.drive(self._number, nanoseconds(limit))
            if outcome and unpack(outcome)[0] in (Status.PENDING, Status.TIMEOUT):
                return False
            self._finished = outcome == 0  # else wait() raises what is the matter
        return True
