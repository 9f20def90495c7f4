"""All-reduce over send and recv: four algorithms, for any number of ranks and elements.

With p ranks, n bytes, latency a per message and b per byte (reduction left out), one rank needs about:

    naive       2 (p - 1) (a + n b) at rank 0      the reference: adds up in rank order
    ring        2 (p - 1) a + 2 (p - 1)/p n b      least bytes; large messages
    tree        2 log2(p) (a + n b)                few messages; small messages
    butterfly   2 log2(p) a + 2 (p - 1)/p n b      both, on powers of two; else one message more each way

Each leaves bitwise the same result on every rank: an element is added up on one rank and copied to the others.
"""

from __future__ import annotations

from typing import Protocol

from unidist.algorithms._messages import cut, even_counts, exchange, receive, send, send_to_all_others
from unidist.algorithms._reduce import reduce_into, scale_in_place
from unidist.algorithms.collectives import binomial_broadcast, ring_allgather
from unidist.buffer import Buffer
from unidist.communicator import Communicator, ReduceOp


class Algorithm(Protocol):
    """An algorithm that reduces a buffer over all ranks with send and recv. Collective; all ranks use the same one."""

    def __call__(self, channel: Communicator, buffer: Buffer, *, op: ReduceOp, scale: float) -> None:
        """Reduce `buffer` in place and return when it holds the result.

        Args:
            channel: carries no other messages meanwhile.
            buffer: `(n,)` elements in host memory, n and dtype the same on every rank.
            op: the reduction; has a meaning for the dtype.
            scale: factor of the result.
        """


def naive_allreduce(channel: Communicator, buffer: Buffer, *, op: ReduceOp, scale: float) -> None:
    """Send everything to rank 0, which adds up in rank order and sends the result to everybody."""
    if channel.rank != 0:
        send(channel, buffer, to=0)
        receive(channel, buffer, source=0)
        return
    incoming = Buffer.allocate(buffer.count, buffer.dtype)
    for rank in range(1, channel.size):
        receive(channel, incoming, source=rank)
        reduce_into(buffer, incoming, op)
    scale_in_place(buffer, scale)
    send_to_all_others(channel, buffer)


def ring_allreduce(channel: Communicator, buffer: Buffer, *, op: ReduceOp, scale: float) -> None:
    """Pass pieces around the ring, added up on the first way round and copied on the second.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, section 3.
    """
    rank, size = channel.rank, channel.size
    pieces = cut(buffer, even_counts(buffer.count, size))
    incoming = Buffer.allocate(pieces[0].count, buffer.dtype)
    # Piece i starts at rank i + 1 and is complete when it comes to rank i, after size - 1 steps.
    for step in range(size - 1):
        piece = pieces[(rank - step - 2) % size]
        arriving = incoming.slice(0, piece.count)
        outgoing = pieces[(rank - step - 1) % size]
        exchange(channel, outgoing, to=(rank + 1) % size, incoming=arriving, source=(rank - 1) % size)
        reduce_into(piece, arriving, op)
    scale_in_place(pieces[rank], scale)
    ring_allgather(channel, pieces)


def tree_allreduce(channel: Communicator, buffer: Buffer, *, op: ReduceOp, scale: float) -> None:
    """Reduce to rank 0 over a binomial tree, and broadcast over the same tree."""
    rank, size = channel.rank, channel.size
    incoming = None
    distance = 1
    while distance < size:
        if rank & distance:
            send(channel, buffer, to=rank - distance)
            break
        if rank + distance < size:
            incoming = incoming or Buffer.allocate(buffer.count, buffer.dtype)
            receive(channel, incoming, source=rank + distance)
            reduce_into(buffer, incoming, op)
        distance *= 2
    if rank == 0:
        scale_in_place(buffer, scale)
    binomial_broadcast(channel, buffer, root=0)


def butterfly_allreduce(channel: Communicator, buffer: Buffer, *, op: ReduceOp, scale: float) -> None:
    """Halve the piece with a partner at each step while adding up, then double it back.

    Rabenseifner, "Optimization of collective reduction operations", 2004, section 4.1. Of a number of ranks
    that is not a power of two, the ranks above the next lower one hand their data to a partner and wait.
    """
    rank, size = channel.rank, channel.size
    core = 1 << (size.bit_length() - 1)  # the largest power of two that is at most `size`
    if rank >= core:
        send(channel, buffer, to=rank - core)
        receive(channel, buffer, source=rank - core)
        return
    excess = rank + core if rank + core < size else None
    incoming = Buffer.allocate(buffer.count if excess is not None else -(-buffer.count // 2), buffer.dtype)
    if excess is not None:
        receive(channel, incoming, source=excess)
        reduce_into(buffer, incoming, op)
    start, stop = 0, buffer.count
    halvings = []
    distance = 1
    while distance < core:
        partner = rank ^ distance
        # The partner differs in this bit only, so both have made the same cuts so far and hold the same [start, stop).
        middle = (start + stop + 1) // 2
        low, high = buffer.slice(start, middle - start), buffer.slice(middle, stop - middle)
        kept, given = (high, low) if rank & distance else (low, high)
        arriving = incoming.slice(0, kept.count)
        exchange(channel, given, to=partner, incoming=arriving, source=partner)
        reduce_into(kept, arriving, op)
        halvings.append((partner, kept, given))
        start, stop = (middle, stop) if rank & distance else (start, middle)
        distance *= 2
    scale_in_place(buffer.slice(start, stop - start), scale)
    for partner, kept, given in reversed(halvings):
        exchange(channel, kept, to=partner, incoming=given, source=partner)
    if excess is not None:
        send(channel, buffer, to=excess)


ALGORITHMS: dict[str, Algorithm] = {
    "naive": naive_allreduce,
    "ring": ring_allreduce,
    "tree": tree_allreduce,
    "butterfly": butterfly_allreduce,
}
"""Every all-reduce algorithm, by the word in `--allreduce-algorithm`."""
