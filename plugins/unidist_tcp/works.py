"""Operations under way, and the codes by which Python and C name things."""

from __future__ import annotations

import time
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING

from typing_extensions import override

from unidist.buffer import DType
from unidist.communicator import ReduceOp, Work
from unidist_tcp import _tcp

if TYPE_CHECKING:
    from unidist_tcp.communicator import TcpCommunicator

DTYPE_CODES = {DType(name): code for code, name in enumerate(_tcp.DTYPES)}
OP_CODES = {ReduceOp(name): code for code, name in enumerate(_tcp.REDUCE_OPS)}
SLICE_NS = 200_000_000
"""The longest wait within C, between which the interpreter handles signals."""


class Opcode(IntEnum):
    """The operations, as in `native/plan.h`."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    REDUCESCATTER = 3
    ALLTOALL = 4
    BARRIER = 5
    MESSAGE = 6


class Status(IntEnum):
    """The state of an operation, as in `native/tcp.h`."""

    DONE = 0
    PENDING = 1
    TIMEOUT = 2
    LOST = 3
    ABORTED = 4
    MISMATCH = 5
    CLOSED = 6
    MISFIT = 7


def nanoseconds(duration: timedelta) -> int:
    """Return a duration for the C side, where 0 means not to wait at all."""
    return max(1, int(duration.total_seconds() * 1e9))


class TcpWork(Work):
    """An operation of the C code. Waiting for it drives everything that is under way.

    Args:
        communicator: whose it is.
        operation: of the C code.
        what: names it in messages.
        nbytes: of a message that is received.
    """

    __slots__ = ("_communicator", "_is_done", "_nbytes", "_operation", "_what")

    def __init__(self, communicator: TcpCommunicator, operation: _tcp.Operation, what: str, nbytes: int = 0) -> None:
        self._communicator = communicator
        self._operation = operation
        self._what = what
        self._nbytes = nbytes
        self._is_done = False

    @override
    def wait(self, timeout: timedelta | None = None) -> None:
        if self._is_done:
            return
        limit_ns = self._communicator.timeout_ns if timeout is None else nanoseconds(timeout)
        status = self._operation.drive(min(limit_ns, SLICE_NS))
        if status == Status.TIMEOUT and limit_ns > SLICE_NS:
            status = self._go_on(limit_ns - SLICE_NS)
        if status:
            waited = self._communicator.timeout if timeout is None else timeout
            self._communicator.raise_status(status, self._operation, self._what, waited, self._nbytes)
        self._is_done = True

    def _go_on(self, limit_ns: int) -> int:
        """Wait in slices, between which the interpreter handles signals."""
        end = time.monotonic_ns() + limit_ns
        while True:
            left = end - time.monotonic_ns()
            status = self._operation.drive(max(1, min(left, SLICE_NS)))
            if status != Status.TIMEOUT or left <= SLICE_NS:
                return status

    @override
    def done(self) -> bool:
        return self._is_done or self._operation.drive(0) != Status.PENDING

    @override
    def poll(self, limit: timedelta) -> bool:
        return self._is_done or self._operation.drive(nanoseconds(limit)) not in (Status.PENDING, Status.TIMEOUT)
