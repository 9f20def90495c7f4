"""Reductions of tensors by name: all-reduce and reduce-scatter, with Horovod's signatures. See `operations`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import tensorflow as tf

from unidist.errors import OperationError
from unidist.horovod_api.reduce_ops import Op, allreduction, reducescattering, reduction_of
from unidist.horovod_api.scope import scope_of
from unidist.negotiation import reducescatter_rows
from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist.runtime import context
from unidist_arrays.operations import prepare_allreduce, prepare_reducescatter
from unidist_tensorflow.operations.compression import Compression, Compressor
from unidist_tensorflow.operations.dispatch import apply, as_tensor, execute
from unidist_tensorflow.operations.errors import as_op_errors

Average, Sum, Adasum, Min, Max, Product = Op.Average, Op.Sum, Op.Adasum, Op.Min, Op.Max, Op.Product


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Return the reduction of `tensor` over all ranks. Differentiable.

    Args:
        tensor: `tf.Tensor`, variable or `tf.IndexedSlices`, of one shape on every rank. Slices are gathered, equal
            indices not yet summed; they have Average and Sum only, and no scaling.
        average: deprecated by Horovod: True for Average, False for Sum.
        device_dense: device for compressing and decompressing; the exchange itself starts from host memory.
        device_sparse: device for averaging slices.
        compression: `Compression.none`, `.fp16` or `.bf16`: the type in which it is reduced.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: factor for the tensor before the reduction.
        postscale_factor: factor for the result. On integers the scaling is done in float64 and truncated.
        name: by which the ranks match the operation.
        process_set: the ranks that take part.
        ignore_name_scope: in graphs, leave name scopes out of the name by which ranks match.

    Raises:
        MismatchError: the ranks' calls differ; see `errors` for what it is to TensorFlow.
        PeerLostError: a rank is gone.
    """
    [result] = _reduce_each(
        [tensor],
        _reduction_of(op, average),
        (device_dense, device_sparse),
        compression,
        (prescale_factor, postscale_factor),
        name,
        process_set,
        ignore_name_scope,
        kind="Allreduce",
    )
    return result


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Return the reductions of several tensors, which are submitted and exchanged together. See `allreduce`."""
    return _reduce_each(
        tensors,
        _reduction_of(op, average),
        (device_dense, device_sparse),
        compression,
        (prescale_factor, postscale_factor),
        name,
        process_set,
        ignore_name_scope,
        kind="GroupedAllreduce",
    )


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Op.Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Return this rank's rows of the reduction over all ranks. Differentiable.

    Args:
        tensor: `(rows, ...)`, the same shape on every rank. Rows that do not divide go to the first ranks.
        device_dense: see `allreduce`.
        compression: see `allreduce`.
        op: Average or Sum.
        name: by which the ranks match the operation.
        process_set: the ranks that take part.
        ignore_name_scope: see `allreduce`.
        prescale_factor: see `allreduce`.
        postscale_factor: see `allreduce`.
    """
    with _device(device_dense):
        compressed, ctx = compression.compress(as_tensor(tensor))
        [result] = _reducescatter(
            [compressed],
            op,
            prescale_factor,
            postscale_factor,
            name,
            process_set,
            ignore_name_scope,
            "Reducescatter",
        )
        return compression.decompress(result, ctx)


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Op.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """Return this rank's rows of the reductions of several tensors, submitted together. See `reducescatter`."""
    if not tensors:
        return []
    with _device(device_dense):
        pairs = [compression.compress(as_tensor(tensor)) for tensor in tensors]
        results = _reducescatter(
            [compressed for compressed, _ in pairs],
            op,
            prescale_factor,
            postscale_factor,
            None,
            process_set,
            False,
            "GroupedReducescatter",
        )
        return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)]


# Implementation


def _reduction_of(op: int | None, average: bool | None) -> Op:
    with as_op_errors():
        return reduction_of(op, average)


def _device(name: str) -> AbstractContextManager[Any]:
    device: AbstractContextManager[Any] = tf.device(name) if name else nullcontext()
    return device


def _reduce_each(
    tensors: Sequence[Any],
    reduction: Op,
    devices: tuple[str, str],
    compression: type[Compressor],
    scaling: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
    *,
    kind: str,
) -> list[Any]:
    """Reduce dense tensors and slices, each kind in one exchange."""
    slices = [index for index, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    dense = [index for index, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    results: list[Any] = [None] * len(tensors)
    if slices:
        _check_sparse(reduction, scaling)
        sparse_name = None if name is None else f"{name}.sparse"
        with _device(devices[1]):
            gathered = _sparse_allreduce(
                [tensors[index] for index in slices], reduction, sparse_name, process_set, ignore_name_scope
            )
        for index, result in zip(slices, gathered, strict=True):
            results[index] = result
    if dense:
        with _device(devices[0]):
            pairs = [compression.compress(as_tensor(tensors[index])) for index in dense]
            wire = [compressed for compressed, _ in pairs]
            reduced = _allreduce(wire, reduction, scaling, name, process_set, ignore_name_scope, kind)
            for index, result, (_, ctx) in zip(dense, reduced, pairs, strict=True):
                results[index] = compression.decompress(result, ctx)
    return results


def _check_sparse(reduction: Op, scaling: tuple[float, float]) -> None:
    if reduction not in (Op.Average, Op.Sum):
        raise NotImplementedError(
            f"{reduction.name} of tf.IndexedSlices: slices are gathered, which gives Average and Sum only; convert "
            "them with tf.convert_to_tensor, or pass sparse_as_dense=True to DistributedOptimizer"
        )
    if scaling != (1.0, 1.0):
        raise NotImplementedError("prescale_factor and postscale_factor do not apply to tf.IndexedSlices")


def _sparse_allreduce(
    slices: Sequence[tf.IndexedSlices],
    reduction: Op,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
) -> list[tf.IndexedSlices]:
    """Gather values and indices of all, in one exchange."""
    from unidist_tensorflow.operations.movement import allgather_together

    parts = [as_tensor(each.values) for each in slices] + [as_tensor(each.indices) for each in slices]
    gathered = allgather_together(parts, name, ignore_name_scope, process_set)
    size = scope_of(process_set).size
    results = []
    for values, indices, each in zip(gathered[: len(slices)], gathered[len(slices) :], slices, strict=True):
        scaled = values / tf.cast(size, values.dtype) if reduction is Op.Average else values
        results.append(tf.IndexedSlices(scaled, indices, dense_shape=each.dense_shape))
    return results


def _allreduce(
    tensors: Sequence[tf.Tensor],
    reduction: Op,
    scaling: tuple[float, float],
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
    kind: str,
) -> list[tf.Tensor]:
    prescale, postscale = scaling
    if reduction is Op.Adasum and context.is_initialized():  # refused here, also where the graph runs later
        allreduction(reduction, prescale=1.0, postscale=1.0, size=scope_of(process_set).size, process_set=process_set)
    prepare = partial(prepare_allreduce, op=reduction, prescale=prescale, postscale=postscale, process_set=process_set)

    def run(*inputs: tf.Tensor) -> list[tf.Tensor]:
        return execute(
            prepare,
            inputs,
            [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs],
            kind=kind,
            name=name,
            process_set=process_set,
            grouped=True,
            ignore_name_scope=ignore_name_scope,
        )

    def backward(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        return _allreduce(gradients, reduction, scaling, None, process_set, ignore_name_scope, kind)

    return apply(run, backward, *tensors)


def _reducescatter(
    tensors: Sequence[tf.Tensor],
    op: int,
    prescale: float,
    postscale: float,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
    kind: str,
) -> list[tf.Tensor]:
    prepare = partial(prepare_reducescatter, op=op, prescale=prescale, postscale=postscale, process_set=process_set)

    with as_op_errors():  # where the graph is built, if that is known there
        reducescattering(op, prescale=prescale, postscale=postscale, size=1)
        if any(tensor.shape.rank == 0 for tensor in tensors):
            raise OperationError("reducescatter divides rows; a scalar has none")

    def run(*inputs: tf.Tensor) -> list[tf.Tensor]:
        return execute(
            prepare,
            inputs,
            [tf.TensorSpec(_rows_here(tensor.shape, process_set), tensor.dtype) for tensor in inputs],
            kind=kind,
            name=name,
            process_set=process_set,
            grouped=True,
            ignore_name_scope=ignore_name_scope,
        )

    def backward(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        from unidist_tensorflow.operations.movement import allgather_together

        factor = prescale * postscale * (scope_of(process_set).size if op == Op.Sum else 1)
        scaled = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
        return allgather_together(scaled, None, ignore_name_scope, process_set)

    return apply(run, backward, *tensors)


def _rows_here(shape: tf.TensorShape, process_set: ProcessSet) -> tf.TensorShape:
    """Return the static shape of this rank's rows, as far as it is known while the graph is built."""
    if not shape.rank:
        return tf.TensorShape(None)
    if shape[0] is None or not context.is_initialized():
        return tf.TensorShape([None]).concatenate(shape[1:])
    scope = scope_of(process_set)
    return tf.TensorShape([reducescatter_rows(shape[0], scope.size)[scope.rank]]).concatenate(shape[1:])
