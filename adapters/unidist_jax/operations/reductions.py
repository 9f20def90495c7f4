"""Reductions by name: all-reduce and reduce-scatter, of arrays and of trees of arrays. See `operations`."""

from __future__ import annotations

from typing import Any

import jax

from unidist.horovod_api.reduce_ops import Op, check_adasum, checked_op
from unidist.horovod_api.scope import scope_of
from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist_jax.operations import collectives
from unidist_jax.operations.calls import Leaves, call, leaves_of, name_of
from unidist_jax.operations.collectives import AllGather, AllReduce, ReduceScatter
from unidist_jax.operations.compression import Compression, Compressor

Average, Sum, Adasum, Min, Max, Product = Op.Average, Op.Sum, Op.Adasum, Op.Min, Op.Max, Op.Product


def allreduce(
    tree: Any,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the reduction of an array, or of each array of a tree, over all ranks. Differentiable in reverse mode.

    Args:
        tree: arrays, numbers, or a tree of them, of the same structure, shapes and dtypes on every rank.
        name: by which the ranks match the operation; that of a tree's leaves are numbered.
        compression: `Compression.none`, `.fp16` or `.bf16`: the type in which it is reduced.
        op: Average, Sum, Adasum, Min, Max or Product.
        prescale_factor: factor for the arrays before the reduction.
        postscale_factor: factor for the result. On integers the scaling is done in float64 and truncated.
        process_set: the ranks that take part.

    Returns:
        A tree like the argument. As in Horovod, the gradient is reduced in the same way.

    Raises:
        MismatchError: the ranks' calls differ. Within a compiled program, an error with this text; see `translated`.
        PeerLostError: a rank is gone; likewise.
    """
    reduction = checked_op(op)
    check_adasum(reduction, process_set)
    leaves, structure = leaves_of(tree)
    if not leaves:
        return tree
    name = name_of("allreduce", name, leaves, process_set)
    compressed = [compression.compress(leaf) for leaf in leaves]
    results = _allreduce([c[0] for c in compressed], name, reduction, prescale_factor, postscale_factor, process_set)
    restored = [compression.decompress(result, c[1]) for result, c in zip(results, compressed, strict=True)]
    return jax.tree.unflatten(structure, restored)


def grouped_allreduce(
    tensors: Any,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the reductions of several arrays, exchanged together: `allreduce` of a list, under Horovod's name."""
    return allreduce(tensors, name, compression, op, prescale_factor, postscale_factor, process_set)


def reducescatter(
    tree: Any,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Return this rank's rows of the reduction over all ranks. Differentiable in reverse mode.

    Args:
        tree: arrays `(rows, ...)`, or a tree of them, of the same shapes on every rank. Rows that do not divide go to
            the first ranks.
        name: by which the ranks match the operation.
        compression: see `allreduce`.
        op: Average or Sum.
        process_set: the ranks that take part.
        prescale_factor: see `allreduce`.
        postscale_factor: see `allreduce`.
    """
    leaves, structure = leaves_of(tree)
    if not leaves:
        return tree
    name = name_of("reducescatter", name, leaves, process_set)
    compressed = [compression.compress(leaf) for leaf in leaves]
    operation = ReduceScatter(name, process_set, checked_op(op), prescale_factor, postscale_factor)

    def backward(gradients: list[Any]) -> Leaves:
        factor = prescale_factor * postscale_factor * (scope_of(process_set).size if op is Op.Sum else 1)
        scaled = [gradient * factor if factor != 1.0 else gradient for gradient in gradients]
        return call(AllGather(f"{name}.grad", process_set), scaled)

    results = call(operation, [c[0] for c in compressed], backward)
    restored = [compression.decompress(result, c[1]) for result, c in zip(results, compressed, strict=True)]
    return jax.tree.unflatten(structure, restored)


def grouped_reducescatter(
    tensors: Any,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Return this rank's rows of several reductions: `reducescatter` of a list, under Horovod's name."""
    return reducescatter(tensors, name, compression, op, process_set, prescale_factor, postscale_factor)


def _allreduce(
    leaves: Leaves, name: str, op: Op, prescale: float, postscale: float, process_set: ProcessSet
) -> list[Any]:
    def backward(gradients: list[Any]) -> Leaves:
        return _allreduce(gradients, f"{name}.grad", op, prescale, postscale, process_set)

    kind = collectives.Adasum if op is Op.Adasum else AllReduce
    return call(kind(name, process_set, op, prescale, postscale), leaves, backward)
