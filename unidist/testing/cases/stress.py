"""Random programs: the same sequence of operations on every rank, over a group and its parts, against numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, ReduceOp, Work
from unidist.testing.cases._arrays import Array, exact_values, reduced
from unidist.testing.cases._placing import Outcomes, place, room

T = TypeVar("T")

DTYPES = (DType.UINT8, DType.INT32, DType.INT64, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64)


KINDS = ("allreduce", "allgather", "broadcast", "reducescatter", "alltoall", "ring")
# Sizes of every way through an engine, and just beside the limits between them.
COUNTS = (0, 1, 5, 63, 64, 65, 1000, 1024, 1025, 2049, 8193, 30_000, 300_001)
NUM_GROUPS = 4


@dataclass(frozen=True)
class Operation:
    """One operation of a program, the same on every rank.

    Args:
        kind: of `KINDS`; "ring" sends to the next rank and receives from the one before.
        dtype: of `DTYPES`.
        op: where the kind has one.
        count: elements, about.
        group: 0 the communicator itself, 1 its halves, 2 all ranks but the first, backwards, 3 a duplicate.
        seed: of the values.
    """

    kind: str
    dtype: DType
    op: ReduceOp
    count: int
    group: int
    seed: int


@dataclass
class _Pending:
    what: str
    work: Work
    target: Buffer
    expected: Array
    also: Work | None = None


def random_program(communicator: Communicator, seed: int, length: int) -> None:
    """Run `length` operations chosen by `seed`; see `run_program`."""
    chosen = np.random.default_rng(seed)

    def one_of(choices: Sequence[T]) -> T:
        return choices[int(chosen.integers(len(choices)))]

    operations = [
        Operation(
            one_of(("allreduce", *KINDS)),
            one_of(DTYPES),
            one_of(list(ReduceOp)),
            one_of(COUNTS),
            one_of(range(NUM_GROUPS)),
            number,
        )
        for number in range(length)
    ]
    run_program(communicator, operations, seed)


def run_program(communicator: Communicator, operations: Sequence[Operation], seed: int) -> None:
    """Run operations over a group and its parts; a few are under way at a time and waited for in random order.

    The operations are the same on all ranks. By `seed`, each rank decides where its memory is and what it waits for
    next.
    """
    own = np.random.default_rng((seed, communicator.rank))
    pending: list[_Pending] = []
    with ExitStack() as stack:
        groups = [communicator, *(stack.enter_context(_split(communicator, ranks)) for ranks in _parts(communicator))]
        for number, operation in enumerate(operations):
            group = groups[operation.group]
            if group is not None:  # ranks outside of it skip its turn
                pending.append(_start(group, operation, own, f"seed {seed}, operation {number}"))
            while pending and (len(pending) > 8 or own.random() < 0.3):
                _finish(communicator.rank, pending.pop(int(own.integers(len(pending)))))
        while pending:
            _finish(communicator.rank, pending.pop(int(own.integers(len(pending)))))


def _parts(communicator: Communicator) -> list[Sequence[int]]:
    size, rank = communicator.size, communicator.rank
    halves = [other for other in range(size) if (other < size // 2) == (rank < size // 2)]
    most = list(range(size - 1, 0, -1)) if size > 1 else [0]
    return [halves, most if rank in most else (), range(size)]


@contextmanager
def _split(communicator: Communicator, ranks: Sequence[int]) -> Iterator[Communicator | None]:
    """Split, and close the part in the end; operations may be under way there where one has failed."""
    part = communicator.split(ranks)
    try:
        yield part
    except BaseException as exc:
        if part is not None:
            part.abort(f"the program failed on rank {communicator.rank}: {exc}")
        raise
    finally:
        if part is not None:
            part.close()


def _start(group: Communicator, operation: Operation, own: np.random.Generator, where: str) -> _Pending:
    starts: dict[str, Callable[..., _Pending]] = {
        "allreduce": _allreduce,
        "allgather": _allgather,
        "broadcast": _broadcast,
        "reducescatter": _reducescatter,
        "alltoall": _alltoall,
        "ring": _ring if group.size > 1 else _allreduce,
    }
    step, engine = np.random.default_rng(operation.seed), bool(own.integers(2))
    what = (
        f"{where}: {operation.kind} {operation.op} of {operation.dtype} by {operation.count} over {group.description}"
    )
    start = starts[operation.kind]
    return start(group, step, operation.dtype, operation.op, operation.count, engine, what)


def _allreduce(
    group: Communicator, step: np.random.Generator, dtype: DType, op: ReduceOp, count: int, engine: bool, what: str
) -> _Pending:
    values = [exact_values(step, count, dtype, op) for _ in range(group.size)]
    source = place(group, values[group.rank], dtype, engine=engine)
    target = source if count % 2 else room(group, count, dtype, engine=engine)
    work = group.allreduce(source, target, op=op, scale=0.5)
    return _Pending(what, work, target, reduced(values, dtype, op, 0.5))


def _allgather(
    group: Communicator, step: np.random.Generator, dtype: DType, op: ReduceOp, count: int, engine: bool, what: str
) -> _Pending:
    counts = [int(step.integers(count // group.size + 1)) for _ in range(group.size)]
    values = [exact_values(step, each, dtype, op) for each in counts]
    target = room(group, sum(counts), dtype, engine=engine)
    work = group.allgather(place(group, values[group.rank], dtype, engine=engine), target, counts=counts)
    return _Pending(what, work, target, np.concatenate(values))


def _broadcast(
    group: Communicator, step: np.random.Generator, dtype: DType, op: ReduceOp, count: int, engine: bool, what: str
) -> _Pending:
    root, values = int(step.integers(group.size)), exact_values(step, count, dtype, op)
    buffer = (
        place(group, values, dtype, engine=engine) if group.rank == root else room(group, count, dtype, engine=engine)
    )
    return _Pending(what, group.broadcast(buffer, root=root), buffer, values)


def _reducescatter(
    group: Communicator, step: np.random.Generator, dtype: DType, op: ReduceOp, count: int, engine: bool, what: str
) -> _Pending:
    counts = [int(step.integers(count // group.size + 1)) for _ in range(group.size)]
    values = [exact_values(step, sum(counts), dtype, op) for _ in range(group.size)]
    start = sum(counts[: group.rank])
    source = place(group, values[group.rank], dtype, engine=engine)
    target = (
        source.slice(start, counts[group.rank]) if count % 2 else room(group, counts[group.rank], dtype, engine=engine)
    )
    work = group.reducescatter(source, target, op=op, counts=counts)
    return _Pending(what, work, target, reduced(values, dtype, op, 1.0)[start : start + counts[group.rank]])


def _alltoall(
    group: Communicator, step: np.random.Generator, dtype: DType, op: ReduceOp, count: int, engine: bool, what: str
) -> _Pending:
    size, rank = group.size, group.rank
    matrix = step.integers(count // size + 1, size=(size, size)).tolist()
    values = [exact_values(step, sum(row), dtype, op) for row in matrix]
    received = [matrix[i][rank] for i in range(size)]
    target = room(group, sum(received), dtype, engine=engine)
    source = place(group, values[rank], dtype, engine=engine)
    work = group.alltoall(source, target, send_counts=matrix[rank], receive_counts=received)
    parts = [values[i][sum(matrix[i][:rank]) : sum(matrix[i][: rank + 1])] for i in range(size)]
    return _Pending(what, work, target, np.concatenate(parts))


def _ring(
    group: Communicator, step: np.random.Generator, dtype: DType, op: ReduceOp, count: int, engine: bool, what: str
) -> _Pending:
    values = [exact_values(step, count, dtype, op) for _ in range(group.size)]
    target = room(group, count, dtype, engine=engine)
    before = (group.rank - 1) % group.size
    receiving = group.recv(target, source=before)
    sending = group.send(place(group, values[group.rank], dtype, engine=engine), to=(group.rank + 1) % group.size)
    return _Pending(what, receiving, target, values[before], also=sending)


def _finish(rank: int, item: _Pending) -> None:
    item.work.wait()
    if item.also is not None:
        item.also.wait()
    Outcomes(rank).check(item.what, item.target, item.expected)
