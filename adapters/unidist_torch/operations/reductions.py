"""Reductions of tensors by name: all-reduce and reduce-scatter, with Horovod's signatures. See `operations`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unidist.algorithms import scale_in_place
from unidist.buffer import Buffer
from unidist.errors import OperationError
from unidist.horovod_api.reduce_ops import Op, allreduction, check_adasum, reducescattering, reduction_of
from unidist.horovod_api.scope import Scope, scope_of
from unidist.negotiation import Request, reducescatter_rows
from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist_torch.memory import buffer_of
from unidist_torch.operations import differentiable
from unidist_torch.operations.compression import Compression, Compressor
from unidist_torch.operations.handles import AnyHandle, GroupHandle, Handle
from unidist_torch.operations.places import StreamOrder, place, place_in, stream_order
from unidist_torch.scaling import scaled_integers

Average, Sum, Adasum, Min, Max, Product = Op.Average, Op.Sum, Op.Adasum, Op.Min, Op.Max, Op.Product


# All-reduce


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the reduction of `tensor` over all ranks; the tensor itself is not changed. Differentiable.

    Args:
        tensor: dense, of any shape, the same on every rank.
        average: deprecated by Horovod: True for Average, False for Sum.
        name: by which the ranks match the operation.
        compression: `Compression.none`, `.fp16` or `.bf16`: the type in which it is reduced.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: factor for the tensor before the reduction.
        postscale_factor: factor for the result. On integers the scaling is done in float64 and truncated.
        process_set: the ranks that take part.

    Raises:
        MismatchError: the ranks' calls differ.
        PeerLostError: a rank is gone.
    """
    reduction = Op.Average if op is None and average is None else reduction_of(op, average)
    scales = prescale_factor, postscale_factor
    if compression is Compression.none and not (tensor.requires_grad and torch.is_grad_enabled()):
        return _allreduce_now(tensor, None, name, reduction, *scales, process_set)
    compressed, ctx = compression.compress(tensor)

    def run(values: torch.Tensor) -> torch.Tensor:
        return _allreduce_now(values, None, name, reduction, *scales, process_set)

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        return allreduce(
            gradient,
            op=reduction,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )

    return compression.decompress(differentiable.apply(compressed, run, backward), ctx)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Start `allreduce` and return a handle; the tensor must not be changed until it is done. Not differentiable."""
    return _allreduce(tensor, None, name, reduction_of(op, average), prescale_factor, postscale_factor, process_set)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Like `allreduce`, but the result replaces the tensor's content; returns the tensor."""
    reduction = reduction_of(op, average)
    return _allreduce_now(tensor, tensor, name, reduction, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Start `allreduce_` and return a handle."""
    return _allreduce(tensor, tensor, name, reduction_of(op, average), prescale_factor, postscale_factor, process_set)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return the reductions of several tensors, which are submitted and exchanged together. Differentiable."""
    reduction = reduction_of(op, average)
    compressed, contexts = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)

    def run(*values: torch.Tensor) -> Sequence[torch.Tensor]:
        return grouped_allreduce_async(
            values, None, name, reduction, prescale_factor, postscale_factor, process_set
        ).wait()

    def backward(*gradients: torch.Tensor) -> list[torch.Tensor]:
        return grouped_allreduce(
            gradients,
            op=reduction,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )

    outputs = differentiable.apply_group(compressed, run, backward)
    return [compression.decompress(output, ctx) for output, ctx in zip(outputs, contexts, strict=True)]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Start `grouped_allreduce` and return a handle."""
    return _grouped_allreduce(
        tensors, [None] * len(tensors), average, name, op, prescale_factor, postscale_factor, process_set
    )


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Like `grouped_allreduce`, but the results replace the tensors' content; returns the tensors."""
    grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set).wait()
    return list(tensors)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> AnyHandle:
    """Start `grouped_allreduce_` and return a handle."""
    return _grouped_allreduce(tensors, list(tensors), average, name, op, prescale_factor, postscale_factor, process_set)


# Reduce-scatter


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Op.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduction over all ranks. Differentiable.

    Args:
        tensor: `(rows, ...)`, the same shape on every rank. Rows that do not divide go to the first ranks.
        name: by which the ranks match the operation.
        compression: see `allreduce`.
        op: Average or Sum.
        process_set: the ranks that take part.
        prescale_factor: see `allreduce`.
        postscale_factor: see `allreduce`.
    """
    compressed, ctx = compression.compress(tensor)

    def run(values: torch.Tensor) -> torch.Tensor:
        scaling = (prescale_factor, postscale_factor)
        return _reducescatter(values, name, op, process_set, scaling, background=False).wait()

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        return _reducescatter_backward(gradient, op, process_set, prescale_factor * postscale_factor)

    return compression.decompress(differentiable.apply(compressed, run, backward), ctx)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Op.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> AnyHandle:
    """Start `reducescatter` and return a handle."""
    return _reducescatter(tensor, name, op, process_set, (prescale_factor, postscale_factor), background=True)


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Op.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this rank's rows of the reductions of several tensors, submitted together. Differentiable."""
    if not tensors:
        return []
    compressed, contexts = zip(*(compression.compress(tensor) for tensor in tensors), strict=True)

    def run(*values: torch.Tensor) -> Sequence[torch.Tensor]:
        return grouped_reducescatter_async(values, name, op, process_set, prescale_factor, postscale_factor).wait()

    def backward(*gradients: torch.Tensor) -> list[torch.Tensor]:
        scale = prescale_factor * postscale_factor
        return [_reducescatter_backward(gradient, op, process_set, scale) for gradient in gradients]

    outputs = differentiable.apply_group(compressed, run, backward)
    return [compression.decompress(output, ctx) for output, ctx in zip(outputs, contexts, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: Op = Op.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> AnyHandle:
    """Start `grouped_reducescatter` and return a handle."""
    name = scope_of(process_set).name("grouped_reducescatter", name)
    scaling = (prescale_factor, postscale_factor)
    return GroupHandle(
        [
            _reducescatter(tensor, f"{name}.{index}", op, process_set, scaling, background=True)
            for index, tensor in enumerate(tensors)
        ]
    )


# Implementation


def _grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor | None],
    average: bool | None,
    name: str | None,
    op: Op | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> GroupHandle:
    reduction = reduction_of(op, average)
    name = scope_of(process_set).name("grouped_allreduce", name)
    return GroupHandle(
        [
            _allreduce(tensor, target, f"{name}.{index}", reduction, prescale, postscale, process_set)
            for index, (tensor, target) in enumerate(zip(tensors, targets, strict=True))
        ]
    )


def _allreduce(
    tensor: torch.Tensor, target: torch.Tensor | None, name: str | None, reduction: Op, *choices: Any
) -> Handle:
    """Start an all-reduce; see `_asked_allreduce`."""
    scope, request, output, copy_back, order = _asked_allreduce(tensor, target, name, reduction, *choices)
    return Handle(scope.submit(request, background=True), lambda: output, copy_back, order=order)


def _allreduce_now(
    tensor: torch.Tensor, target: torch.Tensor | None, name: str | None, reduction: Op, *choices: Any
) -> torch.Tensor:
    """Return the result of an all-reduce; see `_asked_allreduce`."""
    scope, request, output, copy_back, order = _asked_allreduce(tensor, target, name, reduction, *choices)
    scope.run(request)
    if order is not None:
        order.follow()
    if copy_back is not None:
        copy_back()
    return output


def _asked_allreduce(
    tensor: torch.Tensor,
    target: torch.Tensor | None,
    name: str | None,
    reduction: Op,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> tuple[Scope, Request, torch.Tensor, Callable[[], object] | None, StreamOrder | None]:
    """Prepare an all-reduce into `target`, which is None or the tensor itself.

    Returns:
        Where it runs, the operation, where its result is, and for `Handle` what puts it there if it was computed
        elsewhere, and the order of an operation on a device.
    """
    if reduction is Op.Adasum:
        check_adasum(reduction, process_set)
    scope: Scope = process_set.scope or scope_of(process_set)
    asked = allreduction(reduction, prescale=prescale, postscale=postscale, size=scope.size, process_set=process_set)
    source, factor = tensor.detach(), asked.prescale
    copy_back = None
    if source.is_cpu and source.is_contiguous():
        given = result = source
        if target is None:
            result = target = torch.empty_like(source)
    elif target is None:
        source = source.contiguous()
        target = torch.empty_like(source)
        given = place(source, scope)
        result, copy_back = place_in(target, scope)
    else:
        given, copy_back = place_in(source, scope)
        result = given
    scaled = given if factor == 1.0 else _scaled(given, factor)
    order = None if scaled.is_cpu else StreamOrder(scaled, result)
    data = into = buffer_of(scaled, is_ours=True)
    if scaled is not result:  # they have the same shape, dtype and device
        into = Buffer(result.data_ptr(), data.count, data.dtype, result, data.memory)
    request = Request(
        name if name and isinstance(name, str) else scope.name("allreduce", name),
        *(asked.kind, data, into),
        shape=tuple(source.shape),
        op=asked.op,
        scale=asked.scale,
        prescale=factor,
        order=order,
    )
    return scope, request, target, copy_back, order


def _reducescatter(
    tensor: torch.Tensor,
    name: str | None,
    op: Op,
    process_set: ProcessSet,
    scaling: tuple[float, float],
    *,
    background: bool,
) -> Handle:
    scope = scope_of(process_set)
    asked = reducescattering(op, prescale=scaling[0], postscale=scaling[1], size=scope.size)
    if not tensor.dim():
        raise OperationError("reducescatter divides rows; a scalar has none")
    source = place(tensor, scope)
    rows = reducescatter_rows(source.shape[0], scope.size)[scope.rank]
    target = torch.empty((rows, *source.shape[1:]), dtype=source.dtype, device=source.device)
    scaled = _scaled(source, asked.prescale)
    order = stream_order(scaled, target)
    request = Request(
        *(scope.name("reducescatter", name), asked.kind, buffer_of(scaled), buffer_of(target)),
        shape=tuple(source.shape),
        scale=asked.scale,
        prescale=asked.prescale,
        order=order,
    )
    return Handle(scope.submit(request, background=background), lambda: target.to(tensor.device), order=order)


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the contiguous tensor times `factor`, in new memory unless the factor is 1."""
    if factor == 1.0:
        return tensor
    if not tensor.is_cpu:
        return tensor * factor if tensor.is_floating_point() or tensor.is_complex() else scaled_integers(tensor, factor)
    scaled = tensor.clone()
    scale_in_place(buffer_of(scaled), factor)
    return scaled


def _reducescatter_backward(gradient: torch.Tensor, op: Op, process_set: ProcessSet, scale: float) -> torch.Tensor:
    from unidist_torch.operations.movement import allgather

    factor = scale * (scope_of(process_set).size if op is Op.Sum else 1)
    return allgather(gradient * factor if factor != 1.0 else gradient, process_set=process_set)
