"""Reductions of tensors by name: all-reduce and reduce-scatter, with Horovod's signatures. See `operations`."""

from __future__ import annotations

from enum import IntEnum

import torch

from unidist import context
from unidist.communicator import ReduceOp
from unidist.errors import UsageError
from unidist.negotiation import OperationKind, Request, reducescatter_rows
from unidist_torch.handles import Handle, host_copy, names, staged
from unidist_torch.memory import buffer_of


class Op(IntEnum):
    """The reductions by Horovod's names."""

    Average = 0
    Sum = 1
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Min, Max, Product = Op.Average, Op.Sum, Op.Min, Op.Max, Op.Product

_REDUCTIONS = {
    Op.Average: ReduceOp.SUM,
    Op.Sum: ReduceOp.SUM,
    Op.Min: ReduceOp.MIN,
    Op.Max: ReduceOp.MAX,
    Op.Product: ReduceOp.PRODUCT,
}


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return the reduction of `tensor` over all ranks; the tensor itself is not changed.

    Args:
        tensor: dense, of any shape, the same on every rank.
        average: deprecated by Horovod: True for Average, False for Sum.
        name: what ranks match by.
        op: Average (default), Sum, Min, Max or Product.
        prescale_factor: factor for the tensor before the reduction.
        postscale_factor: factor for the result. On integers the scaling is done in float64 and truncated.

    Raises:
        MismatchError: the ranks' calls differ.
        PeerLostError: a rank is gone.
    """
    return allreduce_async(
        tensor,
        average,
        name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        _background=False,
    ).wait()


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    _background: bool = True,
) -> Handle:
    """Start `allreduce` and return a handle; the tensor must not be changed until it is done."""
    source = tensor.detach().contiguous()
    target = torch.empty_like(source)
    return _allreduce(source, target, average, name, op, prescale_factor, postscale_factor, background=_background)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Like `allreduce`, but the result replaces the tensor's content; returns the tensor."""
    return allreduce_async_(
        tensor,
        average,
        name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        _background=False,
    ).wait()


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    *,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    _background: bool = True,
) -> Handle:
    """Start `allreduce_` and return a handle."""
    return _allreduce(tensor, tensor, average, name, op, prescale_factor, postscale_factor, background=_background)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    *,
    op: Op = Op.Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduction over all ranks.

    Args:
        tensor: `(rows, ...)`, the same shape on every rank. Rows that do not divide go to the first ranks.
        name: what ranks match by.
        op: Average or Sum.
        prescale_factor: see `allreduce`.
        postscale_factor: see `allreduce`.
    """
    return _reducescatter(tensor, name, op, prescale_factor, postscale_factor, background=False).wait()


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    *,
    op: Op = Op.Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start `reducescatter` and return a handle."""
    return _reducescatter(tensor, name, op, prescale_factor, postscale_factor, background=True)


def reduction_of(op: Op | None, average: bool | None) -> Op:
    """Return the reduction that Horovod's two arguments ask for."""
    if op is not None and average is not None:
        raise ValueError("give op or average, not both; average is deprecated, use op")
    if op is None:
        return Op.Sum if average is False else Op.Average
    return Op(op)


def _allreduce(
    source: torch.Tensor,
    target: torch.Tensor,
    average: bool | None,
    name: str | None,
    op: Op | None,
    prescale: float,
    postscale: float,
    *,
    background: bool,
) -> Handle:
    runtime = context.current()
    reduction = reduction_of(op, average)
    scale = prescale * postscale
    if scale != 1.0 and reduction not in (Op.Average, Op.Sum):
        raise UsageError(f"prescale_factor and postscale_factor apply to Average and Sum, not to {reduction.name}")
    if reduction is Op.Average:
        scale /= runtime.topology.world_size
    in_place = source is target
    given, copy_back = staged(target if in_place else source)
    result, from_result = (given, copy_back) if in_place else staged(target)
    request = Request(
        name or names.next("allreduce", runtime),
        OperationKind.ALLREDUCE,
        buffer_of(given),
        buffer_of(result),
        tuple(source.shape),
        _REDUCTIONS[reduction],
        0,
        scale,
    )
    handle = runtime.negotiator.submit(request, background=background)
    return Handle(handle, lambda: target, from_result)


def _reducescatter(
    tensor: torch.Tensor, name: str | None, op: Op, prescale: float, postscale: float, *, background: bool
) -> Handle:
    runtime = context.current()
    if op not in (Op.Average, Op.Sum):
        raise UsageError(f"reducescatter computes Average or Sum, not {Op(op).name}")
    if not tensor.dim():
        raise UsageError("reducescatter divides rows; a scalar has none")
    source = host_copy(tensor)
    size, rank = runtime.topology.world_size, runtime.topology.rank
    rows = reducescatter_rows(source.shape[0], size)[rank]
    target = torch.empty((rows, *source.shape[1:]), dtype=source.dtype)
    request = Request(
        name or names.next("reducescatter", runtime),
        OperationKind.REDUCESCATTER,
        buffer_of(source),
        buffer_of(target),
        tuple(source.shape),
        scale=prescale * postscale / (size if op is Op.Average else 1),
    )
    handle = runtime.negotiator.submit(request, background=background)
    return Handle(handle, lambda: target.to(tensor.device), None)
