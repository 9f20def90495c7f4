"""Checks of the arguments of collectives: what one rank can see without asking the others."""

from __future__ import annotations

from collections.abc import Sequence

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, ReduceOp
from unidist.errors import UsageError


def check_same_type(operation: str, source: Buffer, target: Buffer) -> None:
    """Raise UsageError unless both buffers have the same dtype and memory kind."""
    if source.dtype != target.dtype or source.memory != target.memory:
        raise UsageError(
            f"{operation}: source is {source.dtype} in {source.memory} memory, target is {target.dtype} in "
            f"{target.memory} memory; they must be equal"
        )


def check_order(dtype: DType, op: ReduceOp) -> None:
    """Raise UsageError where a reduction compares numbers that have no order."""
    if dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise UsageError(f"{op} of {dtype}: complex numbers have no order. Use sum or product.")


def check_count(operation: str, name: str, buffer: Buffer, expected: int) -> None:
    """Raise UsageError unless `buffer` holds exactly the expected number of elements."""
    if buffer.count != expected:
        raise UsageError(f"{operation}: {name} holds {buffer.count} elements, but the operation needs {expected}")


def checked_counts(
    operation: str, counts: Sequence[int] | None, default: Sequence[int], communicator: Communicator
) -> Sequence[int]:
    """Return `counts`, or `default` when it is None; raise UsageError unless there is one valid count per rank."""
    counts = default if counts is None else counts
    if len(counts) != communicator.size or min(counts) < 0:
        raise UsageError(
            f"{operation}: counts {list(counts)} must be {communicator.size} numbers of at least 0, "
            f"one for each rank of {communicator.description}"
        )
    return counts
