"""Operations of the shm engine under way. Whoever waits or polls moves them on; no thread is needed."""

from __future__ import annotations

from collections import deque
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING

from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp, Work
from unidist.engines import _shm
from unidist.errors import MismatchError, UsageError

if TYPE_CHECKING:
    from unidist.engines._shm_communicator import ShmCommunicator

DTYPE_CODES = {DType(name): code for code, name in enumerate(_shm.DTYPES)}
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
    """How a wait ended, as in `shm_native/group.h`."""

    OK = 0
    PENDING = 1
    TIMEOUT = 2
    LOST = 3
    ABORTED = 4


def unpack(outcome: int) -> tuple[Status, int]:
    """Return the status and the rank that a negative outcome of the C side stands for."""
    return Status(-outcome % 8), -outcome // 8 - 1


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
            outcome = communicator.drive(self._number, limit)
            if outcome:
                communicator.raise_outcome(outcome, self._opcode.name.lower(), timeout or communicator.timeout)
            self._finished = True
        self._check()

    def done(self) -> bool:
        if not self._finished:
            outcome = self._communicator.drive(self._number, 0)
            if outcome and unpack(outcome)[0] is Status.PENDING:
                return False
            self._finished = outcome == 0  # else wait() raises what is the matter
        return True

    def _check(self) -> None:
        error = self._communicator.errors.pop(self._number, None)
        if error is not None:
            raise error


class SendWork(Work):
    """A message in engine memory, which the receiver reads in place."""

    def __init__(self, communicator: ShmCommunicator, to: int, number: int) -> None:
        self._communicator = communicator
        self._to = to
        self._number = number

    def wait(self, timeout: timedelta | None = None) -> None:
        communicator = self._communicator
        communicator.check_open()
        limit = timeout or communicator.timeout
        outcome = communicator.group.wait_sent(self._to, self._number, nanoseconds(limit))
        if outcome:
            communicator.raise_outcome(outcome, f"send to rank {self._to}", limit)

    def done(self) -> bool:
        self._communicator.check_open()
        outcome = self._communicator.group.wait_sent(self._to, self._number, 0)
        return outcome == 0 or unpack(outcome)[0] is not Status.PENDING


class ReceiveWork(Work):
    """A message to come; messages of one sender are taken in the order in which they were asked for."""

    def __init__(self, communicator: ShmCommunicator, source: int, buffer: Buffer) -> None:
        self._communicator = communicator
        self._source = source
        self._buffer = buffer
        self._finished = False
        self._error: UsageError | None = None

    def wait(self, timeout: timedelta | None = None) -> None:
        limit = timeout or self._communicator.timeout
        outcome = self._advance(nanoseconds(limit))
        if outcome:
            self._communicator.raise_outcome(outcome, f"recv from rank {self._source}", limit)
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        outcome = self._advance(0)
        return outcome == 0 or unpack(outcome)[0] is not Status.PENDING

    def _advance(self, timeout_ns: int) -> int:
        self._communicator.check_open()
        with self._communicator.message_lock:
            queue = self._communicator.incoming.get(self._source, deque())
            while not self._finished:
                outcome = queue[0]._take(timeout_ns)
                if outcome:
                    return outcome
                queue.popleft()
        return 0

    def _take(self, timeout_ns: int) -> int:
        buffer = self._buffer
        code = DTYPE_CODES[buffer.dtype]
        outcome = self._communicator.group.receive(self._source, buffer.address, buffer.nbytes, code, timeout_ns)
        if isinstance(outcome, tuple):
            nbytes, dtype = outcome
            self._error = MismatchError(
                f"recv on rank {self._communicator.rank} asked rank {self._source} for {buffer.nbytes} bytes of "
                f"{buffer.dtype}, but the message has {nbytes} bytes of {dtype}. The message is lost."
            )
            outcome = 0
        self._finished = outcome == 0
        return outcome
