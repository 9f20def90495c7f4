"""The part of one rank in `unidist doctor --measure`: it times arithmetic, memory and messages, with all the others.

Every time is the median of several, after one that does not count; of a collective, what the slowest rank took.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, MessageOrder, ReduceOp
from unidist.errors import ConfigurationError, UsageError
from unidist.runtime import context

MESSAGE_BYTES = (8, 1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 22, 1 << 24)
"""Sizes that are timed, of messages and of all-reduces."""
_MATRIX = 1024
_COPIED_BYTES = 64 << 20
_ARITHMETIC_SEC = 0.5
_TIMED_BYTES = 64 << 20
"""A size is repeated until about so much was moved, from `_FEWEST` to `_MOST` times."""
_FEWEST, _MOST = 5, 200
_WARM_UP = 3


@dataclass(frozen=True)
class RankFigures:
    """Figures that one rank has measured.

    Args:
        engine: that moved the bytes, in words.
        dtype: of the matrices.
        flops: operations in a second in matrix products, while all ranks computed.
        memory_bandwidth: bytes in a second, read and written, while all ranks copied.
        messages: `(bytes, seconds)` of a message between ranks 0 and 1; empty on other ranks.
        allreduces: `(bytes, seconds)` of an all-reduce over all ranks.
    """

    engine: str
    dtype: str
    flops: float
    memory_bandwidth: float
    messages: tuple[tuple[float, float], ...]
    allreduces: tuple[tuple[float, float], ...]


def measure() -> RankFigures:
    """Time everything on this rank. Every rank of the job calls it at the same time; 2 ranks or more.

    Raises:
        ConfigurationError: numpy is not installed, or the engine cannot send and receive.
        UsageError: there is only one rank.
        StalledError: a rank did not come in time.
    """
    running = context.init()
    try:
        world = running.duplicate_world()
        try:
            return _measured(world)
        finally:
            world.close()
    finally:
        context.shutdown()


def _measured(world: Communicator) -> RankFigures:
    if world.size < 2:
        raise UsageError("one rank exchanges nothing; measure with 2 or more")
    if world.capabilities.messages is MessageOrder.NONE:
        raise ConfigurationError(
            f"{world.description} cannot send and receive, so messages cannot be timed; choose another engine"
        )
    flops = _flops(world)
    bandwidth = _memory_bandwidth(world)
    allreduces = tuple((float(size), _allreduce_seconds(world, size)) for size in MESSAGE_BYTES)
    messages = tuple((float(size), _message_seconds(world, size)) for size in MESSAGE_BYTES)
    return RankFigures(world.description, "float32", flops, bandwidth, messages if world.rank < 2 else (), allreduces)


def _flops(world: Communicator) -> float:
    """Return the rate of products of square float32 matrices, by numpy's library, while all ranks compute."""
    try:
        import numpy as np
    except ImportError:
        raise ConfigurationError("arithmetic is timed with numpy, which is not installed: pip install numpy") from None
    left, right = (np.full((_MATRIX, _MATRIX), 0.5, np.float32) for _ in range(2))
    target = np.empty_like(left)
    seconds = _repeated(world, lambda: np.matmul(left, right, out=target), _ARITHMETIC_SEC)
    return 2.0 * _MATRIX**3 / seconds


def _memory_bandwidth(world: Communicator) -> float:
    """Return the bytes that a rank reads and writes in a second when it copies memory, while all ranks do."""
    import numpy as np

    source, target = np.ones(_COPIED_BYTES, np.uint8), np.ones(_COPIED_BYTES, np.uint8)
    return 2.0 * _COPIED_BYTES / _repeated(world, lambda: np.copyto(target, source), _ARITHMETIC_SEC)


def _repeated(world: Communicator, work: Callable[[], object], least_sec: float) -> float:
    """Return the median time of `work`, repeated for `least_sec` on every rank at the same time."""
    work()
    world.barrier().wait()
    times: list[float] = []
    end = time.perf_counter() + least_sec
    while len(times) < _FEWEST or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    world.barrier().wait()  # nobody measures alone
    return statistics.median(times)


def _allreduce_seconds(world: Communicator, size: int) -> float:
    """Return the median over repetitions of the slowest rank's time; the same on every rank."""
    buffer = world.allocate(size).cast(DType.FLOAT32)
    times = []
    for _ in range(_WARM_UP + _times(size)):
        world.barrier().wait()
        start = time.perf_counter()
        world.allreduce(buffer, buffer).wait()
        times.append(time.perf_counter() - start)
    return statistics.median(_slowest(world, times[_WARM_UP:]))


def _message_seconds(world: Communicator, size: int) -> float:
    """Return the median time of half the way of a message from rank 0 to rank 1 and back; 0 on other ranks."""
    times = []
    if world.rank < 2:
        buffer, peer = Buffer.allocate(size, DType.UINT8), 1 - world.rank
        for _ in range(_WARM_UP + _times(size)):
            start = time.perf_counter()
            if world.rank == 0:
                world.send(buffer, to=peer).wait()
                world.recv(buffer, source=peer).wait()
            else:
                world.recv(buffer, source=peer).wait()
                world.send(buffer, to=peer).wait()
            times.append((time.perf_counter() - start) / 2)
    world.barrier().wait()
    return statistics.median(times[_WARM_UP:]) if times else 0.0


def _slowest(world: Communicator, times: list[float]) -> list[float]:
    buffer = Buffer.allocate(len(times), DType.FLOAT64)
    view = buffer.bytes().cast("d")
    view[:] = memoryview(bytearray(len(times) * 8)).cast("d")
    for index, seconds in enumerate(times):
        view[index] = seconds
    world.allreduce(buffer, buffer, op=ReduceOp.MAX).wait()
    return list(view)


def _times(size: int) -> int:
    return max(_FEWEST, min(_MOST, _TIMED_BYTES // size))
