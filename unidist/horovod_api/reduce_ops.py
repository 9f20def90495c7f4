"""The reductions by Horovod's names, and what each asks of an engine. Knows no tensors."""

from __future__ import annotations

import functools
import warnings
from enum import IntEnum
from typing import NamedTuple

from unidist.communicator import ReduceOp
from unidist.errors import OperationError
from unidist.negotiation import OperationKind
from unidist.negotiation.process_sets import ProcessSet, global_process_set


class Op(IntEnum):
    """The reductions by Horovod's names."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


_REDUCTIONS = {
    Op.Average: ReduceOp.SUM,
    Op.Sum: ReduceOp.SUM,
    Op.Adasum: ReduceOp.SUM,  # not looked at
    Op.Min: ReduceOp.MIN,
    Op.Max: ReduceOp.MAX,
    Op.Product: ReduceOp.PRODUCT,
}


class Reduction(NamedTuple):
    """A reduction as an engine performs it.

    Args:
        kind: all-reduce, Adasum or reduce-scatter.
        op: combines elements.
        prescale: factor that the caller applies to its own tensor first, as Horovod does: after the sum it would be
            too late for one that overflows, and truncated integers add up to another sum.
        scale: factor that the engine applies to the result.
    """

    kind: OperationKind
    op: ReduceOp
    prescale: float
    scale: float


def reduction_of(op: int | None, average: bool | None) -> Op:
    """Return the reduction that Horovod's two arguments ask for."""
    if average is not None:
        if op is not None:
            raise ValueError("give op or average, not both; average is deprecated, use op")
        warnings.warn("average is deprecated, use op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        return Op.Average if average else Op.Sum
    return Op.Average if op is None else checked_op(op)


def checked_op(op: int) -> Op:
    """Return the reduction of this number.

    Raises:
        OperationError: there is none.
    """
    try:
        return Op(op)
    except ValueError:
        raise OperationError(f"op={op!r} is no reduction; choices: {', '.join(item.name for item in Op)}") from None


def check_adasum(op: Op, process_set: ProcessSet) -> None:
    """Raise NotImplementedError for Adasum over a process set, on ranks outside of it too, as Horovod does."""
    if op is Op.Adasum and process_set is not global_process_set:
        raise NotImplementedError(f"Adasum runs over all ranks, not over {process_set!r}")


@functools.lru_cache(maxsize=256, typed=True)
def allreduction(op: Op, *, prescale: float, postscale: float, size: int, process_set: ProcessSet) -> Reduction:
    """Return how an all-reduce over `size` ranks is asked for; programs ask for the same again and again.

    Raises:
        NotImplementedError: Adasum over a process set or a number of ranks that is no power of 2, as in Horovod.
    """
    kind, scale = OperationKind.ALLREDUCE, postscale
    if op is Op.Average:
        scale /= size
    if op is Op.Adasum:
        kind = OperationKind.ADASUM
        check_adasum(op, process_set)
        if size & (size - 1):
            raise NotImplementedError(f"Adasum combines ranks in pairs: {size} ranks are not a power of 2")
    return Reduction(kind, _REDUCTIONS[op], prescale, scale)


def reducescattering(op: int, *, prescale: float, postscale: float, size: int) -> Reduction:
    """Return how a reduce-scatter over `size` ranks is asked for.

    Raises:
        OperationError: a reduction other than Average and Sum.
    """
    if checked_op(op) not in (Op.Average, Op.Sum):
        raise OperationError(f"reducescatter computes Average or Sum, not {Op(op).name}")
    scale = postscale / (size if op == Op.Average else 1)
    return Reduction(OperationKind.REDUCESCATTER, ReduceOp.SUM, prescale, scale)
