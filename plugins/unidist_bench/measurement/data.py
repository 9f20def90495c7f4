"""The buffers of a call, what is in them before it, and what has to be in them after it."""

from __future__ import annotations

from collections.abc import Sequence

from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp
from unidist_bench import pattern
from unidist_bench.collectives import TRAITS, Collective
from unidist_bench.measurement.interface import MeasuredCall


def make_call(
    collective: Collective,
    areas: Sequence[Buffer],
    count: int,
    *,
    dtype: DType,
    op: ReduceOp,
    root: int,
    rank: int,
    size: int,
    in_place: bool,
) -> MeasuredCall:
    """Return a call whose buffers are at the beginning of the areas.

    Args:
        collective: which.
        areas: memory for the larger buffer, and unless the call is in place for the other one: uint8.
        count: elements of the larger buffer.
        dtype: of the elements; of a collective without data it does not count.
        op: of a reduction.
        root: of a broadcast.
        rank: this rank.
        size: number of ranks.
        in_place: source and target are the same memory, or one is a piece of the other.
    """
    if not TRAITS[collective].has_data:
        nothing = Buffer(0, 0, DType.UINT8)
        return MeasuredCall(collective, nothing, nothing, op, root, rank, size)
    whole = areas[0].slice(0, count * dtype.itemsize).cast(dtype)
    other = whole if in_place else areas[1].slice(0, count * dtype.itemsize).cast(dtype)
    piece = count // size
    source, target = whole, other
    if collective is Collective.ALLGATHER:
        source = whole.slice(rank * piece if in_place else 0, piece)
    elif collective is Collective.REDUCESCATTER:
        target = other.slice(rank * piece if in_place else 0, piece)
    return MeasuredCall(collective, source, target, op, root, rank, size)


def prepare(call: MeasuredCall) -> None:
    """Fill the source with this rank's pattern, and the rest of the target with what no result is."""
    dtype, rank, size = call.source.dtype, call.rank, call.size
    pattern.spoil(call.target)
    match call.collective:
        case Collective.ALLREDUCE | Collective.REDUCESCATTER:
            pattern.fill(call.source, pattern.values_of(rank, size, dtype, call.op))
        case Collective.ALLGATHER | Collective.SENDRECV:
            pattern.fill(call.source, pattern.values_of(rank, size, dtype))
        case Collective.BROADCAST if rank == call.root:
            pattern.fill(call.target, pattern.values_of(rank, size, dtype))
        case Collective.ALLTOALL:
            for other, piece in enumerate(_pieces(call.source, size)):
                pattern.fill(piece, pattern.values_of(rank * size + other, size, dtype))


def count_wrong(call: MeasuredCall) -> int:
    """Return how many elements of this rank's target are not what they must be, after `prepare` and one call."""
    dtype, rank, size = call.target.dtype, call.rank, call.size
    match call.collective:
        case Collective.ALLREDUCE:
            return pattern.count_wrong(call.target, pattern.reduced(size, call.op, dtype))
        case Collective.REDUCESCATTER:
            first = rank * call.target.count
            return pattern.count_wrong(call.target, pattern.reduced(size, call.op, dtype), first=first)
        case Collective.ALLGATHER:
            return sum(
                pattern.count_wrong(piece, pattern.values_of(other, size, dtype))
                for other, piece in enumerate(_pieces(call.target, size))
            )
        case Collective.BROADCAST:
            return pattern.count_wrong(call.target, pattern.values_of(call.root, size, dtype))
        case Collective.ALLTOALL:
            return sum(
                pattern.count_wrong(piece, pattern.values_of(other * size + rank, size, dtype))
                for other, piece in enumerate(_pieces(call.target, size))
            )
        case Collective.SENDRECV if call.partner is not None:
            return pattern.count_wrong(call.target, pattern.values_of(call.partner, size, dtype))
    return 0


def _pieces(buffer: Buffer, size: int) -> list[Buffer]:
    each = buffer.count // size
    return [buffer.slice(index * each, each) for index in range(size)]
