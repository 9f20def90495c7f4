"""Messages between pairs of ranks. Each function runs on every rank of a group of at least two."""

from __future__ import annotations

import time
from datetime import timedelta

import numpy as np
import pytest

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, Work
from unidist.errors import MismatchError
from unidist.testing.cases._arrays import Array, array_of, buffer_of
from unidist.testing.cases._placing import Outcomes, place, room

_SIZES = (0, 1, 17, 4096, 8192, 8193, 1 << 20, 20_000_000)
_MANY = 150


def ring(communicator: Communicator) -> None:
    """Messages of 0 bytes to 20 MB go around the ring, from and to every kind of memory."""
    rank, size = communicator.rank, communicator.size
    for nbytes in _SIZES:
        for engine in (False, True):
            source = place(communicator, _payload(rank, nbytes), DType.UINT8, engine=engine)
            target = room(communicator, nbytes, DType.UINT8, engine=engine != bool(rank % 2))
            sending = communicator.send(source, to=(rank + 1) % size)
            communicator.recv(target, source=(rank - 1) % size).wait()
            sending.wait()
            _expect(communicator, f"{nbytes} bytes", target, _payload((rank - 1) % size, nbytes))


def messages_keep_their_order(communicator: Communicator) -> None:
    """Every rank sends every other one more messages than any engine's queue holds, before anybody receives."""
    rank, size = communicator.rank, communicator.size
    others = [other for other in range(size) if other != rank]
    sent: list[Buffer] = []
    works: list[Work] = []
    for number in range(_MANY):
        for other in others:
            values = np.array([rank, other, number], np.int64)
            sent.append(place(communicator, values, DType.INT64, engine=number % 2 == 1))
            works.append(communicator.send(sent[-1], to=other))
    for number in range(_MANY):
        for other in others:
            target = room(communicator, 3, DType.INT64, engine=number % 3 == 1)
            communicator.recv(target, source=other).wait()
            _expect(communicator, f"message {number} of rank {other}", target, np.array([other, rank, number]))
    for work in reversed(works):
        work.wait()


def a_sent_buffer_may_be_changed_after_its_wait(communicator: Communicator) -> None:
    """What is written into a buffer after `wait` does not change what the receiver gets."""
    rank, size = communicator.rank, communicator.size
    for engine in (False, True):
        values = np.full(5000, rank, np.int32)
        source = place(communicator, values, DType.INT32, engine=engine)
        target = room(communicator, 5000, DType.INT32, engine=engine)
        receiving = communicator.recv(target, source=(rank - 1) % size)
        sending = communicator.send(source, to=(rank + 1) % size)
        limit = time.monotonic() + 20
        while not (sending.done() and receiving.done()):  # an engine may move messages in calls of both sides only
            assert time.monotonic() < limit, f"done() of a message stays False on rank {rank}"
        sending.wait()
        array_of(source)[:] = -1
        receiving.wait()
        _expect(communicator, "a message whose buffer was changed later", target, np.full(5000, (rank - 1) % size))


def receives_are_filled_in_the_order_asked(communicator: Communicator) -> None:
    """Several receives are outstanding and waited for in reverse."""
    rank, size = communicator.rank, communicator.size
    targets = [room(communicator, 10 + i, DType.FLOAT32, engine=False) for i in range(20)]
    receiving = [communicator.recv(target, source=(rank + 1) % size) for target in targets]
    sources = [buffer_of(np.full(10 + i, i, np.float32), DType.FLOAT32) for i in range(20)]
    sending = [communicator.send(source, to=(rank - 1) % size) for source in sources]
    for work in reversed(receiving):
        work.wait()
        assert work.done()
    for work in sending:
        work.wait()
    for i, target in enumerate(targets):
        _expect(communicator, f"message {i}", target, np.full(10 + i, i))


def messages_and_collectives_mix(communicator: Communicator) -> None:
    """Messages under way do not disturb collectives, nor the other way round."""
    rank, size = communicator.rank, communicator.size
    target, message = Buffer.allocate(9000, DType.INT32), buffer_of(np.full(9000, rank, np.int32), DType.INT32)
    receiving = communicator.recv(target, source=(rank - 1) % size)
    total = buffer_of(np.full(3, rank, np.int64), DType.INT64)
    reducing = communicator.allreduce(total, total)
    sending = communicator.send(message, to=(rank + 1) % size)
    communicator.barrier().wait()
    reducing.wait()
    receiving.wait()
    sending.wait()
    _expect(communicator, "the sum", total, np.full(3, sum(range(size))))
    _expect(communicator, "the message", target, np.full(9000, (rank - 1) % size))


def a_message_that_nobody_took_does_not_stop_a_barrier(communicator: Communicator) -> None:
    """Sends beyond any queue are under way while every rank goes on to a barrier; then they are received."""
    rank, size = communicator.rank, communicator.size
    sending = [communicator.send(buffer_of(np.array([i]), DType.INT64), to=(rank + 1) % size) for i in range(_MANY)]
    communicator.barrier().wait()
    for i in range(_MANY):
        target = Buffer.allocate(1, DType.INT64)
        communicator.recv(target, source=(rank - 1) % size).wait()
        _expect(communicator, f"message {i}", target, np.array([i]))
        if i == _MANY // 2:
            communicator.barrier().wait()
    for work in sending:
        work.wait()


def a_receive_that_nobody_waits_for_does_not_stop_its_sender(communicator: Communicator) -> None:
    """The sender waits until its engine memory is free; the receiver has asked for it, and sits in a barrier."""
    rank, size = communicator.rank, communicator.size
    source = place(communicator, np.full(5000, rank, np.int32), DType.INT32, engine=True)
    target = Buffer.allocate(5000, DType.INT32)
    receiving = communicator.recv(target, source=(rank - 1) % size)
    sending = communicator.send(source, to=(rank + 1) % size)
    if rank == 0:
        sending.wait()
    communicator.barrier().wait()
    receiving.wait()
    sending.wait()
    _expect(communicator, "the message", target, np.full(5000, (rank - 1) % size))


def a_message_of_another_size_is_a_mismatch(communicator: Communicator) -> None:
    """The receiver learns of it; the next message arrives whole."""
    rank, size = communicator.rank, communicator.size
    works = [
        communicator.send(buffer_of(np.arange(n, dtype=np.int32), DType.INT32), to=(rank + 1) % size) for n in (5, 7)
    ]
    with pytest.raises(MismatchError, match=r"(?s)(16.*20|20.*16)"):  # it names both sizes
        communicator.recv(Buffer.allocate(4, DType.INT32), source=(rank - 1) % size).wait()
    target = Buffer.allocate(7, DType.INT32)
    communicator.recv(target, source=(rank - 1) % size).wait()
    _expect(communicator, "the next message", target, np.arange(7))
    for work in works:
        work.wait()


def one_way_stream(communicator: Communicator) -> None:
    """One rank only sends, its neighbour only receives, at full speed; memory does not pile up with the waits."""
    rank = communicator.rank
    if rank == 0:
        source = place(communicator, _payload(0, 100_000), DType.UINT8, engine=True)
        for _ in range(300):
            communicator.send(source, to=1).wait(timedelta(seconds=20))
    elif rank == 1:
        target = room(communicator, 100_000, DType.UINT8, engine=False)
        for number in range(300):
            communicator.recv(target, source=0).wait()
            _expect(communicator, f"message {number}", target, _payload(0, 100_000))
    communicator.barrier().wait()


def _payload(rank: int, nbytes: int) -> Array:
    return ((np.arange(nbytes, dtype=np.uint32) * 7 + rank * 31) % 251).astype(np.uint8)


def _expect(communicator: Communicator, what: str, found: Buffer, expected: Array) -> None:
    Outcomes(communicator.rank).check(what, found, expected)
