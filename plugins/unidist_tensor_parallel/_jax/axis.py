"""Megatron's conjugate functions on arrays of JAX: the exchanges along the axis `tensor`, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from unidist.communicator import Communicator, ReduceOp
from unidist_arrays.memory import Array, buffer_of_array
from unidist_jax.compiled import HostOperation, ShapeDtype, bind
from unidist_jax.models import EqualInputs
from unidist_jax.optimizer import Cell
from unidist_tensor_parallel.layout.cuts import AXIS, Cut


class TensorAxis:
    """The exchanges of one cut model.

    Args:
        communicator: along the axis; used by nothing else.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.rank = communicator.rank
        self.size = communicator.size
        self._cell = Cell(communicator, self)

    def enter(self, array: Any) -> Any:
        """Return a whole array for use with cut ones: unchanged; its gradients are summed over the ranks."""
        if not _has_gradient(array):
            return array

        @jax.custom_vjp
        def same(given: Any) -> Any:
            return given

        same.defvjp(lambda given: (given, None), lambda _, gradient: (self.reduced(gradient),))
        return same(array)

    def leave(self, array: Any) -> Any:
        """Return the sum of the partial results of all ranks; its gradient goes to every rank unchanged."""
        if not _has_gradient(array):
            return self.reduced(array)

        @jax.custom_vjp
        def summed(given: Any) -> Any:
            return self.reduced(given)

        summed.defvjp(lambda given: (self.reduced(given), None), lambda _, gradient: (gradient,))
        return summed(array)

    def largest(self, array: Any, axes: Sequence[int]) -> Any:
        """Return the maximum along dims of which this rank has a part.

        Its gradient goes to the elements that have this value, in equal parts, as JAX's does.

        Args:
            array: this rank's part.
            axes: its dims.
        """
        axes = tuple(axes)

        def reduced(given: Any) -> Any:
            return self.reduced(jnp.max(given, axes), ReduceOp.MAX)

        if not _has_gradient(array):
            return reduced(array)

        @jax.custom_vjp
        def largest(given: Any) -> Any:
            return reduced(given)

        def forward(given: Any) -> Any:
            found = reduced(given)
            return found, (given, found)

        def backward(kept: Any, gradient: Any) -> Any:
            given, found = kept
            chosen = (given == jnp.expand_dims(found, axes)).astype(given.dtype)
            count = self.reduced(jnp.sum(chosen, axes))
            return (chosen * jnp.expand_dims(gradient / count, axes),)

        largest.defvjp(forward, backward)
        return largest(array)

    def gather(self, array: Any, cut: Cut) -> Any:
        """Return the parts of all ranks as a whole array; each rank gets its part of the gradient."""
        if not _has_gradient(array):
            return self._gathered(array, cut)

        @jax.custom_vjp
        def whole(given: Any) -> Any:
            return self._gathered(given, cut)

        whole.defvjp(lambda given: (self._gathered(given, cut), None), lambda _, gradient: (self.own(gradient, cut),))
        return whole(array)

    def split(self, array: Any, cut: Cut) -> Any:
        """Return this rank's part of a whole array, the reverse of `gather`."""
        if not _has_gradient(array):
            return self.own(array, cut)

        @jax.custom_vjp
        def own(given: Any) -> Any:
            return self.own(given, cut)

        own.defvjp(lambda given: (self.own(given, cut), None), lambda _, gradient: (self._gathered(gradient, cut),))
        return own(array)

    def reduced(self, array: Any, op: ReduceOp = ReduceOp.SUM) -> Any:
        """Return the reduction over all ranks, without a gradient."""
        (result,) = bind(_Reduce(self._cell, op), [array])
        return result

    def check_equal(self, arrays: Sequence[Any]) -> None:
        """Let the program that is traced raise UsageError if the ranks give it different arrays in its first run."""
        keys = [jnp.issubdtype(array.dtype, jax.dtypes.prng_key) for array in arrays]
        plain = [jax.random.key_data(each) if is_key else each for each, is_key in zip(arrays, keys, strict=True)]
        if plain:
            bind(EqualInputs(self._cell, AXIS), plain)

    def own(self, array: Any, cut: Cut) -> Any:
        """Return this rank's part of a whole array, without a gradient."""
        parts = [jax.lax.slice_in_dim(array, start, stop, axis=cut.dim) for start, stop in cut.ranges(self.rank)]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, cut.dim)

    def _gathered(self, array: Any, cut: Cut) -> Any:
        (rows,) = bind(_Gather(self._cell, cut.counts), [jnp.moveaxis(array, cut.dim, 0)])
        if len(cut.blocks) > 1:  # rank by rank so far
            order = np.argsort([index for rank in range(cut.size) for index in cut.indices(rank)])
            rows = rows[order]
        return jnp.moveaxis(rows, 0, cut.dim)


class _AxisOperation(HostOperation):
    can_be_batched: ClassVar[bool] = False

    def __init__(self, cell: Cell[Communicator]) -> None:
        self._cell = cell


class _Reduce(_AxisOperation):
    """A sum or maximum over the ranks of the axis."""

    def __init__(self, cell: Cell[Communicator], op: ReduceOp) -> None:
        super().__init__(cell)
        self._op = op

    @property
    @override
    def title(self) -> str:
        return "a sum over the axis 'tensor'"

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return list(operands)

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        communicator = self._cell.value
        communicator.allreduce(buffer_of_array(operands[0]), buffer_of_array(results[0]), op=self._op).wait()


class _Gather(_AxisOperation):
    """The rows of all ranks, rank by rank.

    Args:
        cell: the communicator.
        counts: rows of each rank.
    """

    def __init__(self, cell: Cell[Communicator], counts: Sequence[int]) -> None:
        super().__init__(cell)
        self._counts = tuple(counts)

    @property
    @override
    def title(self) -> str:
        return "the gathering of an array over the axis 'tensor'"

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        (rows,) = operands
        return [ShapeDtype((sum(self._counts), *rows.shape[1:]), rows.dtype)]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        source, target = buffer_of_array(operands[0]), buffer_of_array(results[0])
        width = target.count // sum(self._counts)
        self._cell.value.allgather(source, target, counts=[count * width for count in self._counts]).wait()


def _has_gradient(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def starts(counts: Sequence[int]) -> list[int]:
    """Return where each rank's elements begin."""
    return [0, *itertools.accumulate(counts)][:-1]
