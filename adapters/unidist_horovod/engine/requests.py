"""Named requests as operations of Horovod, and their outcomes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import ReduceOp
from unidist.errors import UsageError
from unidist.negotiation.request import OperationKind, Request
from unidist_horovod.bindings.carriers import (
    Array,
    HorovodReduction,
    array_of,
    marks,
    moved,
    num_moved,
    to_wide,
    write_wide,
)
from unidist_horovod.bindings.interface import MOVED_DTYPES, REDUCED_DTYPES, Pending

if TYPE_CHECKING:
    from unidist_horovod.engine.group import HorovodGroup


@dataclass
class Outcome:
    """The outcome of a request: `output` and `rows` are valid after `finish` was called."""

    output: Buffer
    rows: tuple[int, ...] = ()
    finish: Callable[[], None] = field(default=lambda: None)


def start(group: HorovodGroup, request: Request, name: str) -> tuple[list[Pending], Outcome]:
    """Give Horovod a request, as `name`; it is done when all that is returned is.

    Raises:
        UsageError: Horovod has no such operation.
        OperationFailed: Horovod refuses it.
    """
    if request.signature.memory != HOST:
        raise request.error(f"the engine horovod moves host memory, not {request.signature.memory}")
    return _STARTERS[request.kind](group, request, name)


def _allreduce(group: HorovodGroup, request: Request, name: str) -> tuple[list[Pending], Outcome]:
    reduction = HorovodReduction(request.source, request.target, request.op, request.scale)
    shape = (*request.shape, *reduction.marks, *_pair(request.source.dtype))
    return _reduce(group, reduction, shape, name), Outcome(request.target, finish=reduction.finish)


def _reducescatter(group: HorovodGroup, request: Request, name: str) -> tuple[list[Pending], Outcome]:
    source, target = request.source, request.target
    if request.op is ReduceOp.SUM and source.dtype in REDUCED_DTYPES and group.is_in_order and source.count:
        piece = HorovodReduction(target, target, request.op, request.scale)
        pending = group.process.binding.reducescatter(
            source, target, shape=request.shape, scale=piece.scale, name=name, members=group.process_set
        )
        return [pending], Outcome(target, finish=piece.finish)
    outcome = Buffer.allocate(source.count, source.dtype)
    reduction = HorovodReduction(source, outcome, request.op, request.scale)
    row = prod(request.shape[1:])
    small, larger = divmod(request.shape[0], group.size)
    first = (small * group.rank + min(group.rank, larger)) * row

    def keep() -> None:
        reduction.finish()
        array_of(target)[:] = array_of(outcome.slice(first, target.count))

    shape = (1, *request.shape, *reduction.marks, *_pair(source.dtype))
    return _reduce(group, reduction, shape, name), Outcome(target, finish=keep)


def _reduce(group: HorovodGroup, reduction: HorovodReduction, shape: Sequence[int], name: str) -> list[Pending]:
    return [
        group.process.binding.allreduce(
            reduction.given,
            reduction.result,
            shape=shape,
            op=reduction.op,
            scale=reduction.scale,
            name=name,
            members=group.process_set,
        )
    ]


def _allgather(group: HorovodGroup, request: Request, name: str) -> tuple[list[Pending], Outcome]:
    data, sizes = _gather_rows(group, request, request.shape, name)
    outcome = Outcome(request.target)

    def finish() -> None:
        found = array_of(sizes.output).tolist()
        _deliver(group, request, data.output, found, outcome)

    outcome.finish = finish
    return [data, sizes], outcome


def _gather_rows(group: HorovodGroup, request: Request, shape: Sequence[int], name: str) -> tuple[Pending, Pending]:
    """Gather the data, and how many rows each rank has: Horovod does not tell."""
    source = request.source
    binding, members = group.process.binding, group.process_set
    rows = Buffer.of(np.array([shape[0]], np.int64))
    data = binding.allgather(moved(source), None, shape=_moved_shape(source, shape), name=name, members=members)
    return data, binding.allgather(rows, None, shape=(1,), name=f"{name}.rows", members=members)


def _alltoall(group: HorovodGroup, request: Request, name: str) -> tuple[list[Pending], Outcome]:
    source = moved(request.source)
    order = group.order
    if not group.is_in_order:
        source = _reordered(group, request, source)
    pending = group.process.binding.alltoall(
        source,
        None,
        shape=_moved_shape(request.source, request.shape),
        splits=[request.splits[rank] for rank in order],
        name=name,
        members=group.process_set,
    )
    outcome = Outcome(request.target)
    outcome.finish = lambda: _deliver(group, request, pending.output, list(pending.received), outcome)
    return [pending], outcome


def _reordered(group: HorovodGroup, request: Request, source: Buffer) -> Buffer:
    row = source.count // request.shape[0] if request.shape[0] else 0
    starts = list(itertools.accumulate(request.splits, initial=0))
    values = array_of(source)
    pieces = [values[starts[rank] * row : starts[rank + 1] * row] for rank in group.order]
    return Buffer.of(np.concatenate(pieces)) if source.count else source


def _deliver(group: HorovodGroup, request: Request, data: Buffer, found: list[int], outcome: Outcome) -> None:
    """Copy what came, in the order of the process set, into the output, in the order of the group."""
    assert request.allocate_output is not None, "checked by the request"
    dtype = request.source.dtype
    rows = [0] * group.size
    for position, rank in enumerate(group.order):
        rows[rank] = found[position]
    outcome.rows = tuple(rows)
    outcome.output = request.allocate_output(outcome.rows)
    if not data.count:
        return
    row = prod(request.shape[1:]) * num_moved(dtype)
    values, result = array_of(data), array_of(moved(outcome.output))
    if group.is_in_order:
        result[:] = values
        return
    starts = list(itertools.accumulate(rows, initial=0))
    begin = 0
    for position, rank in enumerate(group.order):
        count = found[position] * row
        result[starts[rank] * row : starts[rank] * row + count] = values[begin : begin + count]
        begin += count


def _broadcast(group: HorovodGroup, request: Request, name: str) -> tuple[list[Pending], Outcome]:
    data = request.target
    pending = group.process.binding.broadcast(
        moved(data),
        shape=_moved_shape(data, request.shape),
        root=group.members[request.root],
        name=name,
        members=group.process_set,
    )
    return [pending], Outcome(data)


def _barrier(group: HorovodGroup, request: Request, name: str) -> tuple[list[Pending], Outcome]:
    token = Buffer.allocate(1, DType.INT32)
    pending = group.process.binding.allreduce(
        token, token, shape=(1,) * 20, op=ReduceOp.MAX, scale=1.0, name=name, members=group.process_set
    )
    return [pending], Outcome(token)


def _adasum(group: HorovodGroup, request: Request, name: str) -> tuple[list[Pending], Outcome]:
    """Gather all vectors on every rank, and combine them there: on a CPU, Horovod's own Adasum needs MPI."""
    if group.size & (group.size - 1):
        raise request.error(f"Adasum combines ranks in pairs: {group.size} ranks are not a power of 2")
    if not request.source.dtype.is_floating:
        raise request.error(f"Adasum needs floating-point numbers, not {request.source.dtype}")
    data, sizes = _gather_rows(group, request, (1, *request.shape), name)

    def finish() -> None:
        gathered = data.output.cast(request.source.dtype)
        count = request.source.count
        vectors = [to_wide(gathered.slice(position * count, count)) for position in np.argsort(group.order).tolist()]
        while len(vectors) > 1:
            vectors = [_combined(*vectors[i : i + 2]) for i in range(0, len(vectors), 2)]
        write_wide(vectors[0] * request.scale, request.target)

    return [data, sizes], Outcome(request.target, finish=finish)


def _combined(a: Array, b: Array) -> Array:
    """Return the Adasum of two vectors, with the same bits as `unidist.algorithms.adasum`."""
    product, norm_a, norm_b = float(a @ b), float(a @ a), float(b @ b)
    factor_a = 1.0 - product / (2 * norm_a) if norm_a > 0 else 1.0
    factor_b = 1.0 - product / (2 * norm_b) if norm_b > 0 else 1.0
    result: Array = factor_a * a + factor_b * b
    return result


def _join(group: HorovodGroup, request: Request, name: str) -> tuple[list[Pending], Outcome]:
    raise UsageError("call join() of the named operations")


def _moved_shape(buffer: Buffer, shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape, *marks(buffer.dtype, MOVED_DTYPES), *((2,) if buffer.dtype is DType.COMPLEX128 else ()))


def _pair(dtype: DType) -> tuple[int, ...]:
    return (2,) if dtype.is_complex else ()


_STARTERS = {
    OperationKind.ALLREDUCE: _allreduce,
    OperationKind.ADASUM: _adasum,
    OperationKind.ALLGATHER: _allgather,
    OperationKind.BROADCAST: _broadcast,
    OperationKind.REDUCESCATTER: _reducescatter,
    OperationKind.ALLTOALL: _alltoall,
    OperationKind.BARRIER: _barrier,
    OperationKind.JOIN: _join,
}
