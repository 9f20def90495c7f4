"""The whole batch, gathered from the ranks: for losses that compare samples with each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from typing_extensions import override

from unidist.errors import OperationError
from unidist.runtime import context
from unidist.training.sample_axis import SampleAxis
from unidist_arrays.memory import Array, buffer_of_array, empty_array
from unidist_jax.compiled import HostOperation, ShapeDtype, bind
from unidist_jax.operations.calls import leaves_of
from unidist_jax.spmd import AXIS, is_within


def gather_samples(tree: Any) -> Any:
    """Return the rows of all ranks that have different samples, in rank order: the whole batch.

    For losses over pairs of samples (CLIP, SimCLR), memory banks and metrics. With the average of the ranks' gradients
    (`distribute`, `TrainStep`) training matches one process whose loss is the mean of the ranks' losses. A rank may
    compute the loss of the whole batch, or the loss of its local rows against all rows. (`allgather` differs: it also
    gathers from ranks that train on the same samples, and its gradient is Horovod's.)

    Collective over the ranks that have different samples, and so is its gradient. Within a compiled function, and where
    a gradient is taken, all ranks give as many rows: the result's shape is part of the program.

    Args:
        tree: arrays `(rows, ...)`, or a tree of them; all dims but the first are equal on every rank.

    Raises:
        NotInitializedError: `init()` was not called.
        OperationError: an array has no rows, or the ranks have different numbers where they must not.
        PeerLostError: a rank is gone, or did not come in time.
    """
    leaves, structure = leaves_of(tree)
    if any(not leaf.ndim for leaf in leaves):
        raise OperationError("gather_samples gathers rows; a scalar has none")
    if _axis().size == 1 and not is_within():
        return tree
    return jax.tree.unflatten(structure, [_gathered(leaf) for leaf in leaves])


def _gathered(array: Any) -> Any:
    def gather(own: Any) -> Any:
        return _run(_Gather(), own)

    return _pair(gather, lambda whole: _run(_ScatterSum(), whole))(array) if _has_gradient(array) else gather(array)


def _run(operation: HostOperation, array: Any) -> Any:
    (result,) = operation.lowered([array], AXIS) if is_within() else bind(operation, [array])
    return result


def _pair(forward: Any, transpose: Any) -> Any:
    """Return a function where each of the two is the gradient of the other."""

    @jax.custom_vjp
    def function(array: Any) -> Any:
        return forward(array)

    function.defvjp(lambda array: (forward(array), None), lambda _, gradient: (_pair(transpose, forward)(gradient),))
    return function


def _has_gradient(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def _axis() -> SampleAxis:
    return context.current().owned(SampleAxis)


class _Gather(HostOperation):
    """Gathers the rows of all ranks."""

    can_be_batched: ClassVar[bool] = False
    title = "gather_samples"

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return [ShapeDtype((each.shape[0] * _axis().size, *each.shape[1:]), each.dtype) for each in operands]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        rows = _axis().rows_of_all(len(operands[0]))
        if len(set(rows)) > 1:
            raise OperationError(
                f"gather_samples in a compiled function: the ranks have {rows} rows, and all must have as many. Give "
                "every rank a batch of one size (shard() with drop_last), or call it outside"
            )
        _axis().gather(buffer_of_array(operands[0]), buffer_of_array(results[0]), rows)

    @override
    def run_at_once(self, operands: Sequence[Array]) -> list[Array]:
        rows = _axis().rows_of_all(len(operands[0]))
        target = empty_array((sum(rows), *operands[0].shape[1:]), operands[0].dtype)
        _axis().gather(buffer_of_array(operands[0]), buffer_of_array(target), rows)
        return [target]

    @override
    def lowered(self, operands: Sequence[Any], axis: str) -> list[Any]:
        return [jax.lax.all_gather(each, axis, tiled=True) for each in operands]


class _ScatterSum(HostOperation):
    """Adds up rows over the ranks, and returns this rank's."""

    can_be_batched: ClassVar[bool] = False
    title = "the gradient of gather_samples"

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return [ShapeDtype((each.shape[0] // _axis().size, *each.shape[1:]), each.dtype) for each in operands]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        rows = [len(results[0])] * _axis().size
        _axis().scatter_sum(buffer_of_array(operands[0]), buffer_of_array(results[0]), rows)

    @override
    def lowered(self, operands: Sequence[Any], axis: str) -> list[Any]:
        return [jax.lax.psum_scatter(each, axis, tiled=True) for each in operands]
