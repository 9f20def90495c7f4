"""Collectives as steps: each is a generator that yields MPI requests and goes on when they are complete.

Small reductions are MPI's own. Larger ones go around a ring in segments that stay in the processor's cache, added up by
the kernels that every engine uses: nonblocking reductions are where MPI libraries are slow (Open MPI 5.0.11, 2 ranks
on one host: 103 ms for 100 MB in place; the ring takes 25). MPI counts in 31 bits; what is larger goes in parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from mpi4py import MPI

from unidist.algorithms import cut, even_counts, reduce_into, scale_in_place
from unidist.buffer import Buffer, DType, copy
from unidist.communicator import ReduceOp
from unidist_mpi.memory import bytes_of, elements_of, memory_of, operation_for

Steps = Iterator[list[MPI.Request]]

MAX_BYTES = (1 << 31) - 1
"""Most bytes of one MPI call."""
_SEGMENT_BYTES = 1 << 20
_RING_BYTES_PER_RANK = 64 << 10
"""From this size of a rank's piece on, a ring is faster than MPI's own nonblocking reduction."""


class MpiLink:
    """An MPI communicator, and how the messages of our own algorithms go over it.

    Args:
        comm: with errors returned.
        tag: of these messages; nobody else's on this communicator.
    """

    def __init__(self, comm: MPI.Comm, tag: int) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._tag = tag
        self._scratch: list[Buffer] = []

    def send(self, buffer: Buffer, to: int) -> list[MPI.Request]:
        """Begin to send a buffer, in segments."""
        return [self.comm.Isend(bytes_of(part), to, self._tag) for part in segments(buffer, _SEGMENT_BYTES)]

    def receive(self, buffer: Buffer, source: int) -> list[MPI.Request]:
        """Begin to receive what the other side sends by `send`; each request fills a segment."""
        return [self.comm.Irecv(bytes_of(part), source, self._tag) for part in segments(buffer, _SEGMENT_BYTES)]

    def scratch(self, dtype: DType) -> list[Buffer]:
        """Return two segments of memory, the same at every call: one operation at a time uses them."""
        if not self._scratch:
            self._scratch = [Buffer.allocate(_SEGMENT_BYTES, DType.UINT8) for _ in range(2)]
        return [buffer.cast(dtype) for buffer in self._scratch]


def segments(buffer: Buffer, most_bytes: int) -> list[Buffer]:
    """Return consecutive parts of a buffer, none for an empty one."""
    most = most_bytes // buffer.dtype.itemsize
    return [buffer.slice(start, min(most, buffer.count - start)) for start in range(0, buffer.count, most)]


def allreduce(link: MpiLink, source: Buffer, target: Buffer, op: ReduceOp, scale: float) -> Steps:
    """Reduce into `target`, which may be `source`."""
    if link.size == 1 or source.nbytes >= link.size * _RING_BYTES_PER_RANK:
        counts = even_counts(source.count, link.size)
        pieces = cut(target, counts)
        yield from _ring_reduce(link, cut(source, counts), pieces, op, scale)
        yield from _ring_gather(link, pieces)
    elif source.count:
        given = _apart(source, target)
        yield [link.comm.Iallreduce(elements_of(given), elements_of(target), operation_for(source.dtype, op))]
        scale_in_place(target, scale)


def reducescatter(
    link: MpiLink, source: Buffer, target: Buffer, op: ReduceOp, scale: float, counts: Sequence[int]
) -> Steps:
    """Reduce piece `rank` into `target`, which may be that piece."""
    given = cut(source, counts)
    if link.size > 1 and source.nbytes < link.size * _RING_BYTES_PER_RANK:
        whole = Buffer.allocate(source.count, source.dtype)
        yield from allreduce(link, source, whole, op, scale)
        copy(cut(whole, counts)[link.rank], target)
        return
    largest = max(counts)
    spare = [Buffer.allocate(largest, source.dtype) for _ in range(min(2, link.size - 1))]
    # A piece is needed from the step in which it comes to the next, in which it is sent on: two take turns.
    pieces = [target] * link.size
    for step in range(link.size - 1):
        piece = _arriving(link, step)
        pieces[piece] = spare[step % 2].slice(0, counts[piece])
    if link.size > 1 and target.address != given[link.rank].address:
        pieces[link.rank] = target
    yield from _ring_reduce(link, given, pieces, op, scale)
    if pieces[link.rank] is not target:
        copy(pieces[link.rank], target)


def broadcast(link: MpiLink, buffer: Buffer, root: int) -> Steps:
    """Copy root's buffer to all."""
    for part in segments(buffer, MAX_BYTES):
        yield [link.comm.Ibcast(bytes_of(part), root)]


def allgather(link: MpiLink, source: Buffer, target: Buffer, counts: Sequence[int]) -> Steps:
    """Fill `target` with the sources of all ranks; the source may be its own place there."""
    pieces = cut(target, counts)
    if target.nbytes > MAX_BYTES:
        copy(source, pieces[link.rank])
        yield from _exchange(link, [pieces[link.rank]] * link.size, pieces)
    elif target.count:
        item = source.dtype.itemsize
        given = _apart(source, pieces[link.rank])
        yield [link.comm.Iallgatherv(bytes_of(given), (memory_of(target), _layout(counts, item), MPI.BYTE))]


def alltoall(
    link: MpiLink, source: Buffer, target: Buffer, send_counts: Sequence[int], receive_counts: Sequence[int]
) -> Steps:
    """Send piece i of `source` to rank i."""
    if max(source.nbytes, target.nbytes) > MAX_BYTES:
        outgoing, incoming = cut(source, send_counts), cut(target, receive_counts)
        copy(outgoing[link.rank], incoming[link.rank])
        yield from _exchange(link, outgoing, incoming)
        return
    item = source.dtype.itemsize
    yield [
        link.comm.Ialltoallv(
            (memory_of(source), _layout(send_counts, item), MPI.BYTE),
            (memory_of(target), _layout(receive_counts, item), MPI.BYTE),
        )
    ]


def barrier(link: MpiLink) -> Steps:
    """Be complete once all have come."""
    yield [link.comm.Ibarrier()]


def _ring_reduce(link: MpiLink, given: Sequence[Buffer], pieces: Sequence[Buffer], op: ReduceOp, scale: float) -> Steps:
    """Leave the reduction of piece `rank` of all ranks' `given` in `pieces[rank]`; the others hold parts of sums.

    The first half of Patarasuk and Yuan's ring (2009). `pieces[i]` may be `given[i]` itself.
    """
    if link.size == 1:
        copy(given[0], pieces[0])
        scale_in_place(pieces[0], scale)
        return
    outgoing = given[(link.rank - 1) % link.size]
    for step in range(link.size - 1):
        piece = _arriving(link, step)
        sending = link.send(outgoing, (link.rank + 1) % link.size)
        factor = scale if step == link.size - 2 else 1.0
        if pieces[piece].address == given[piece].address:
            yield from _receive_onto(link, pieces[piece], op, factor)
        else:
            yield from _receive_and_add(link, pieces[piece], given[piece], op, factor)
        yield sending
        outgoing = pieces[piece]


def _arriving(link: MpiLink, step: int) -> int:
    return (link.rank - step - 2) % link.size


def _receive_and_add(link: MpiLink, target: Buffer, own: Buffer, op: ReduceOp, scale: float) -> Steps:
    """Receive a piece of the rank before into `target` and reduce `own` into it, segment by segment."""
    receiving = link.receive(target, (link.rank - 1) % link.size)
    parts = zip(receiving, segments(target, _SEGMENT_BYTES), segments(own, _SEGMENT_BYTES), strict=True)
    for request, into, addend in parts:
        yield [request]
        reduce_into(into, addend, op, scale)


def _receive_onto(link: MpiLink, target: Buffer, op: ReduceOp, scale: float) -> Steps:
    """Receive a piece of the rank before and reduce it into `target`; one segment comes while one is added."""
    parts = segments(target, _SEGMENT_BYTES)
    rooms = [room.slice(0, part.count) for room, part in zip(itertools.cycle(link.scratch(target.dtype)), parts)]
    before = (link.rank - 1) % link.size
    receiving = [request for room in rooms[:2] for request in link.receive(room, before)]
    for i, part in enumerate(parts):
        yield [receiving[i]]
        reduce_into(part, rooms[i], op, scale)
        if i + 2 < len(parts):
            receiving += link.receive(rooms[i + 2], before)


def _ring_gather(link: MpiLink, pieces: Sequence[Buffer]) -> Steps:
    """Fill every piece with that of the rank of its index."""
    for step in range(link.size - 1):
        outgoing, incoming = pieces[(link.rank - step) % link.size], pieces[(link.rank - step - 1) % link.size]
        receiving = link.receive(incoming, (link.rank - 1) % link.size)
        yield link.send(outgoing, (link.rank + 1) % link.size) + receiving


def _exchange(link: MpiLink, outgoing: Sequence[Buffer], incoming: Sequence[Buffer]) -> Steps:
    """Send `outgoing[i]` to every other rank i and fill `incoming[i]` from it."""
    for distance in range(1, link.size):
        to, source = (link.rank + distance) % link.size, (link.rank - distance) % link.size
        receiving = link.receive(incoming[source], source)
        yield link.send(outgoing[to], to) + receiving


def _apart(source: Buffer, target: Buffer) -> Buffer:
    """Return `source`, or a copy where it is the target.

    MPI_IN_PLACE would not do: MPI wants it from all ranks or from none, and here each rank decides for itself. Open MPI
    then takes different algorithms on different ranks, and memory is overwritten.
    """
    if source.address != target.address or not source.count:
        return source
    given = Buffer.allocate(source.count, source.dtype)
    copy(source, given)
    return given


def _layout(counts: Sequence[int], item: int) -> tuple[list[int], list[int]]:
    """Return sizes and places of pieces in bytes."""
    sizes = [count * item for count in counts]
    return sizes, list(itertools.accumulate(sizes[:-1], initial=0))
