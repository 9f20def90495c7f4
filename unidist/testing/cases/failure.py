"""Deliberate failures. Each function runs on every rank of a group of at least two.

Times are from the monotonic clock, which all processes of a host share: the suite compares them between ranks.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Literal, Protocol

import numpy as np
import pytest

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, ReduceOp, Work
from unidist.errors import MismatchError, PeerLostError, StalledError, UsageError
from unidist.testing.cases._arrays import array_of, buffer_of

Moment = Literal["barrier", "small allreduce", "large allreduce", "engine allreduce", "send", "recv", "split"]
MOMENTS: tuple[Moment, ...] = (
    "barrier", "small allreduce", "large allreduce", "engine allreduce", "send", "recv", "split",
)  # fmt: skip


class Connects(Protocol):
    """A factory of communicators: `EngineConnector`, or its equivalent for threads."""

    def connect(self, name: str = "", *, timeout: timedelta | None = None) -> Communicator:
        """Return a new world communicator. Collective."""

    def close(self, communicator: Communicator) -> None:
        """Close what `connect` returned."""


def mismatches_reach_every_rank(communicator: Communicator) -> list[str]:
    """The last rank calls something else: MismatchError everywhere, and the communicator goes on. Returns the texts."""
    size, rank = communicator.size, communicator.rank
    texts = []
    for what, (usual, odd) in _disagreements(communicator).items():
        before, after = _numbers(3, rank), _numbers(70_001, rank)
        earlier = communicator.allreduce(before, before)
        work = (odd if rank == size - 1 else usual)()
        later = communicator.allreduce(after, after)
        try:
            work.wait()
        except MismatchError as exc:
            texts.append(f"{what}: {exc}")
        else:
            raise AssertionError(f"{what}: no MismatchError on rank {rank}")
        later.wait()
        earlier.wait()
        for buffer in (before, after):
            assert (array_of(buffer) == sum(range(size))).all(), (
                f"after {what} the operations around it are wrong on rank {rank}"
            )
    return texts


def _disagreements(communicator: Communicator) -> dict[str, tuple[Callable[[], Work], Callable[[], Work]]]:
    size, rank = communicator.size, communicator.rank

    def reduce(
        count: int, dtype: DType = DType.FLOAT32, op: ReduceOp = ReduceOp.SUM, scale: float = 1.0
    ) -> Callable[[], Work]:
        return lambda: communicator.allreduce(
            Buffer.allocate(count, dtype), Buffer.allocate(count, dtype), op=op, scale=scale
        )

    def gather(counts: list[int]) -> Callable[[], Work]:
        source, target = Buffer.allocate(counts[rank], DType.INT32), Buffer.allocate(sum(counts), DType.INT32)
        return lambda: communicator.allgather(source, target, counts=counts)

    def scatter(counts: list[int]) -> Callable[[], Work]:
        source, target = Buffer.allocate(sum(counts), DType.INT32), Buffer.allocate(counts[rank], DType.INT32)
        return lambda: communicator.reducescatter(source, target, counts=counts)

    def exchange(sent: int, received: int) -> Callable[[], Work]:
        source, target = Buffer.allocate(sent * size, DType.INT32), Buffer.allocate(received * size, DType.INT32)
        counts, counts2 = [sent] * size, [received] * size
        return lambda: communicator.alltoall(source, target, send_counts=counts, receive_counts=counts2)

    def cast(root: int) -> Callable[[], Work]:
        return lambda: communicator.broadcast(Buffer.allocate(10, DType.INT8), root=root)

    uneven = [2] * size
    uneven[0], uneven[1] = 1, 3
    return {
        "count of a small allreduce": (reduce(4), reduce(5)),
        "count of a large allreduce": (reduce(100_000), reduce(100_001)),
        "small against large": (reduce(4), reduce(100_000)),
        "dtype": (reduce(100), reduce(100, DType.INT32)),
        "reduction": (reduce(100), reduce(100, op=ReduceOp.MAX)),
        "scale": (reduce(100), reduce(100, scale=0.5)),
        "root": (cast(0), cast(1)),
        "kind": (reduce(4), communicator.barrier),
        "allgather and broadcast": (gather([2] * size), cast(0)),
        "counts of allgather": (gather([2] * size), gather(uneven)),
        "counts of reducescatter": (scatter([2] * size), scatter(uneven)),
        "counts of alltoall": (exchange(2, 2), exchange(3, 3)),
    }


def a_rank_that_does_not_come(connects: Connects, limit: timedelta) -> tuple[str, str, tuple[int, ...], float]:
    """All but the last rank wait in an all-reduce until the timeout.

    Returns the kind of the error, its text, the ranks that it names, and the seconds waited; on the last rank
    "absent" and nothing.
    """
    communicator, side = connects.connect("stall", timeout=limit), connects.connect("side")
    buffer = _numbers(70_001, 1)
    outcome: tuple[str, str, tuple[int, ...], float] = ("absent", "", (), 0.0)
    if communicator.rank != communicator.size - 1:
        begin = time.monotonic()
        try:
            communicator.allreduce(buffer, buffer).wait()
        except PeerLostError as exc:
            outcome = (type(exc).__name__, str(exc), exc.ranks, time.monotonic() - begin)
        else:
            raise AssertionError(f"rank {communicator.rank} completed an operation to which the last rank did not come")
    side.barrier().wait()
    try:
        communicator.allreduce(buffer, buffer).wait()
    except PeerLostError:
        pass
    else:
        raise AssertionError(f"rank {communicator.rank} can go on with a communicator after a timeout")
    side.barrier().wait()
    connects.close(communicator)
    connects.close(side)
    return outcome


def a_short_wait(connects: Connects) -> float:
    """`wait(timeout)` counts, not the communicator's own: returns the seconds until StalledError on rank 0."""
    communicator, side = connects.connect("short"), connects.connect("side")
    seconds = 0.0
    if communicator.rank == 0:
        begin = time.monotonic()
        with pytest.raises(StalledError) as caught:
            communicator.recv(Buffer.allocate(1, DType.INT8), source=1).wait(timedelta(seconds=0.2))
        seconds = time.monotonic() - begin
        assert caught.value.ranks == (1,), f"StalledError names ranks {caught.value.ranks}, not 1: {caught.value}"
    side.barrier().wait()
    connects.close(communicator)
    connects.close(side)
    return seconds


def abort_ends_every_wait(connects: Connects, operation: str) -> tuple[float, float, str]:
    """Every rank waits; another thread of rank 0 aborts.

    Returns when it did so (0 on other ranks), when this rank's wait ended, and the text of its error.
    """
    communicator, side = connects.connect("abort"), connects.connect("side")
    waiting, aborted_at = threading.Event(), [0.0]

    def abort() -> None:
        waiting.wait(20)
        time.sleep(0.1)  # let the main thread get from the event into the wait, which nothing outside can see
        aborted_at[0] = time.monotonic()
        communicator.abort("reason forty-two")

    thread = threading.Thread(target=abort) if communicator.rank == 0 else None
    side.barrier().wait()
    if thread is not None:
        thread.start()
    waiting.set()
    text = ""
    try:
        _wait_in_vain(communicator, operation)
    except PeerLostError as exc:
        text = str(exc)
    ended = time.monotonic()
    assert text, f"{operation} on rank {communicator.rank} completed, though not every rank called it"
    if thread is not None:
        thread.join()
    communicator.abort("again")
    for later in ("barrier", "recv", "send"):
        try:
            _wait_in_vain(communicator, later)
        except PeerLostError:
            continue
        raise AssertionError(f"{later} after an abort raises no PeerLostError on rank {communicator.rank}")
    side.barrier().wait()
    connects.close(communicator)
    connects.close(side)
    return aborted_at[0], ended, text


def _wait_in_vain(communicator: Communicator, operation: str) -> None:
    rank, size = communicator.rank, communicator.size
    if operation == "recv" or rank == size - 1:  # the last rank never comes to the others' collective
        communicator.recv(Buffer.allocate(4, DType.INT8), source=(rank + 1) % size).wait()
    elif operation == "barrier":
        communicator.barrier().wait()
    elif operation == "send":
        communicator.send(Buffer.allocate(4, DType.INT8), to=(rank + 1) % size).wait()
        communicator.barrier().wait()
    else:
        buffer = _numbers(1_000_003, rank)
        communicator.allreduce(buffer, buffer).wait()


def operations_after_close(connects: Connects) -> None:
    """Every operation on a closed communicator is a UsageError; close and abort may be called again."""
    communicator = connects.connect("closed")
    part = communicator.split(range(communicator.size))
    assert part is not None
    buffer = Buffer.allocate(4, DType.INT32)
    part.allreduce(buffer, buffer).wait()
    part.close()
    part.close()
    ones = [1] * part.size
    row = Buffer.allocate(part.size, DType.INT32)
    attempts: dict[str, Callable[[], object]] = {
        "allreduce": lambda: part.allreduce(buffer, buffer),
        "allgather": lambda: part.allgather(Buffer.allocate(1, DType.INT32), row),
        "broadcast": lambda: part.broadcast(buffer, root=0),
        "reducescatter": lambda: part.reducescatter(row, Buffer.allocate(1, DType.INT32)),
        "alltoall": lambda: part.alltoall(
            row, Buffer.allocate(part.size, DType.INT32), send_counts=ones, receive_counts=ones
        ),
        "barrier": part.barrier,
        "send": lambda: part.send(buffer, to=0),
        "recv": lambda: part.recv(buffer, source=0),
        "split": lambda: part.split(range(part.size)),
    }
    for what, attempt in attempts.items():
        try:
            attempt()
        except UsageError:
            continue
        raise AssertionError(f"{what} after close() raises no UsageError on rank {communicator.rank}")
    communicator.allreduce(buffer, buffer).wait()  # the parent does not mind
    part.abort("after close")
    connects.close(communicator)


def death(connects: Connects, victim: int, moment: Moment, rank: int) -> tuple[str, float, tuple[int, ...], str]:
    """Kill rank `victim`, which is a separate process, at `moment`; the others must notice.

    Returns ("died", when) on the victim; elsewhere ("noticed", when, the ranks that the error names, its text).
    """
    if rank == victim:
        child = os.fork()  # this process stays, to tell the time of death
        if child == 0:
            with suppress(BaseException):
                _take_part(connects.connect("death", timeout=timedelta(seconds=40)), moment, dies=True)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the victim ended with status {status} instead of dying at {moment!r}"
        return "died", time.monotonic(), (), ""
    communicator = connects.connect("death", timeout=timedelta(seconds=40))
    try:
        _take_part(communicator, moment, dies=False, victim=victim)
    except PeerLostError as exc:
        outcome = ("noticed", time.monotonic(), exc.ranks, f"{type(exc).__name__}: {exc}")
    else:
        raise AssertionError(f"rank {rank} did not notice that rank {victim} died at {moment!r}")
    connects.close(communicator)
    return outcome


def _take_part(communicator: Communicator, moment: Moment, *, dies: bool, victim: int = -1) -> None:
    communicator.barrier().wait()
    work: Work | None = None
    count = 100 if moment == "small allreduce" else 3_000_017
    if moment == "split":
        if dies:
            _die()
        communicator.split(range(communicator.size))
    elif moment == "send":  # it dies with a message on its way, which nobody has asked for yet
        if dies:
            communicator.send(_numbers(1000, 1), to=(communicator.rank + 1) % communicator.size)
    elif moment == "recv":  # it dies while the others send to it
        if dies:
            communicator.recv(_numbers(1000, 1), source=(communicator.rank + 1) % communicator.size)
        else:
            with suppress(PeerLostError):  # a send may be complete before anybody can know
                communicator.send(communicator.allocate(4000).cast(DType.FLOAT32), to=victim).wait()
    elif moment != "barrier":
        buffer = _numbers(count, 1)
        if moment == "engine allreduce":
            buffer = communicator.allocate(8 * count).cast(DType.INT64)
        work = communicator.allreduce(buffer, buffer)
        if dies:
            work.done()
    if dies:
        _die()
    if work is not None:
        work.wait()
    communicator.barrier().wait()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def many_lives(connects: Connects, cycles: int) -> tuple[int, int]:
    """Connect, use, split and close, again and again; return native threads and mappings before and after."""
    counts: list[int] = []
    for number in range(cycles):
        communicator = connects.connect(f"life-{number}")
        part = communicator.split(range(communicator.size))
        assert part is not None
        buffer = _numbers(2000, communicator.rank)
        part.allreduce(buffer, buffer).wait()
        assert (array_of(buffer) == sum(range(part.size))).all()
        part.close()
        connects.close(communicator)
        del communicator, part
        if number in (cycles // 4, cycles - 1):
            counts.append(_native_resources(*counts))
    return counts[0], counts[-1]


def splits_are_given_back(communicator: Communicator, cycles: int) -> tuple[int, int]:
    """Split and close, again and again; return native resources early and late."""
    counts: list[int] = []
    for number in range(cycles):
        part = communicator.split(range(communicator.size))
        assert part is not None
        part.barrier().wait()
        part.close()
        del part
        if number in (cycles // 4, cycles - 1):
            communicator.barrier().wait()
            counts.append(_native_resources(*counts))
    return counts[0], counts[-1]


def _native_resources(wanted: int | None = None) -> int:
    """Count what `Resources` cannot see: threads of libraries and mappings of any kind.

    Above `wanted` it counts again for a while: a thread of a library may still be ending.
    """
    deadline = time.monotonic() + 10.0
    while True:
        with open("/proc/self/maps") as file:
            mappings = sum("memfd" in line for line in file)
        found = mappings + len(os.listdir("/proc/self/task")) + len(os.listdir("/proc/self/fd"))
        if wanted is None or found <= wanted or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def _numbers(count: int, value: int) -> Buffer:
    return buffer_of(np.full(count, value, np.int64), DType.INT64)
