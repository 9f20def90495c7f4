"""The collectives other than all-reduce, over send and recv. Every rank calls them with matching arguments."""

from __future__ import annotations

from collections.abc import Sequence

from unidist.algorithms._messages import exchange, receive, send
from unidist.algorithms._reduce import reduce_into, scale_in_place
from unidist.buffer import Buffer, DType, copy
from unidist.communicator import Communicator, ReduceOp


def ring_allgather(channel: Communicator, pieces: Sequence[Buffer]) -> None:
    """Fill every piece with that of the rank of its index: pieces travel around the ring, size - 1 steps."""
    rank, size = channel.rank, channel.size
    for step in range(size - 1):
        outgoing, incoming = pieces[(rank - step) % size], pieces[(rank - step - 1) % size]
        exchange(channel, outgoing, to=(rank + 1) % size, incoming=incoming, source=(rank - 1) % size)


def binomial_broadcast(channel: Communicator, buffer: Buffer, *, root: int) -> None:
    """Copy `buffer` of `root` to every rank; the ranks that have it double at each step."""
    size = channel.size
    position = (channel.rank - root) % size
    distance = 1
    while distance < size:
        if position < distance and position + distance < size:
            send(channel, buffer, to=(channel.rank + distance) % size)
        elif distance <= position < 2 * distance:
            receive(channel, buffer, source=(channel.rank - distance) % size)
        distance *= 2


def ring_reducescatter(
    channel: Communicator, pieces: Sequence[Buffer], target: Buffer, *, op: ReduceOp, scale: float
) -> None:
    """Leave the reduction of piece `rank` over all ranks in `target`, which may be that piece itself.

    The first half of Patarasuk and Yuan's ring; the pieces are only read, apart from an aliasing target.
    """
    rank, size = channel.rank, channel.size
    if size == 1:
        copy(pieces[0], target)
        scale_in_place(target, scale)
        return
    dtype, largest = target.dtype, max(piece.count for piece in pieces)
    # Two buffers take turns: what came in and was added to is sent on while the next one comes in.
    outgoing = pieces[(rank - 1) % size]
    spare = [Buffer.allocate(largest, dtype), Buffer.allocate(largest, dtype)]
    for step in range(size - 1):
        own = pieces[(rank - step - 2) % size]
        arriving = spare[step % 2].slice(0, own.count)
        exchange(channel, outgoing, to=(rank + 1) % size, incoming=arriving, source=(rank - 1) % size)
        reduce_into(arriving, own, op, scale if step == size - 2 else 1.0)
        outgoing = arriving
    copy(outgoing, target)


def pairwise_alltoall(channel: Communicator, outgoing: Sequence[Buffer], incoming: Sequence[Buffer]) -> None:
    """Send `outgoing[i]` to rank i and fill `incoming[j]` from rank j: one partner further away at each step."""
    rank, size = channel.rank, channel.size
    copy(outgoing[rank], incoming[rank])
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        exchange(channel, outgoing[to], to=to, incoming=incoming[source], source=source)


def dissemination_barrier(channel: Communicator) -> None:
    """Return once every rank has called it: after log2(size) rounds each has heard of all.

    Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988.
    """
    rank, size = channel.rank, channel.size
    token, incoming = Buffer.allocate(1, DType.UINT8), Buffer.allocate(1, DType.UINT8)
    distance = 1
    while distance < size:
        exchange(channel, token, to=(rank + distance) % size, incoming=incoming, source=(rank - distance) % size)
        distance *= 2
