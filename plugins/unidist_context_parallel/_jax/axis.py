"""Communication among the ranks that have the tokens of one batch, as operations of compiled programs.

As in PyTorch, backward passes are the exact transposes: of a sum over the ranks a sum, of a gather a reduce-scatter. So
gradients are averaged over the ranks as in data parallelism. All ranks have equally many tokens, as shapes are part of
a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from unidist.communicator import Communicator
from unidist.errors import UsageError
from unidist.runtime import context
from unidist_arrays.memory import Array, buffer_of_array
from unidist_context_parallel.layout.sequence import AXIS, SequenceLayout, zigzag
from unidist_jax.compiled import HostOperation, ShapeDtype, bind
from unidist_jax.models import EqualInputs
from unidist_jax.optimizer import Cell

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI


class JaxAxis:
    """The ranks of the axis, as seen by one of them. A runtime has one.

    Args:
        runtime: the runtime.

    Attributes:
        rank: of this rank on the axis.
        size: ranks on the axis; 1 without the strategy.
        exchange: how attention gets the keys and values of other ranks, see `ContextParallel`.
    """

    exchange = "ring"

    def __init__(self, runtime: RuntimeAPI) -> None:
        self.rank = runtime.axis_rank(AXIS)
        self.size = runtime.axis_size(AXIS)
        self._runtime = runtime
        self._found: Cell[Communicator] | None = None
        self._lengths: set[int] = set()
        self._compares = True

    def prepare(self, exchange: str) -> None:
        """Make the communicator. Collective over all ranks.

        Raises:
            UsageError: another model of this process exchanges in another way.
        """
        if self._found is None:
            self._found = Cell(self._runtime.new_communicator(AXIS), self)
            self.exchange = exchange
        if exchange != self.exchange:
            raise UsageError(
                f"context:exchange={exchange}: with JAX all models of a process exchange in one way, and an earlier "
                f"one has exchange={self.exchange}"
            )

    def close(self) -> None:
        """The runtime ends; it closes the communicator itself."""

    # Lengths

    def layout(self, tokens: int) -> SequenceLayout:
        """Return the division of a sequence.

        Raises:
            UsageError: it does not divide into two chunks for each rank.
        """
        if not tokens or tokens % (2 * self.size):
            raise UsageError(
                f"context={self.size}: a sequence of {tokens} tokens does not divide into {2 * self.size} equal "
                f"chunks, two for each rank, as JAX needs it. Pad it to {-(-max(tokens, 1) // (2 * self.size))} times "
                f"{2 * self.size}, or use other ranks"
            )
        self._lengths.add(tokens)
        return zigzag(tokens, self.size)

    def layout_of_local(self, tokens: int) -> SequenceLayout:
        """Return the division of which this rank has so many tokens.

        Raises:
            UsageError: no sequence of that length was divided, so these are all tokens of one.
        """
        if tokens * self.size not in self._lengths:
            known = ", ".join(map(str, sorted(each // self.size for each in self._lengths))) or "none"
            raise UsageError(
                f"ud.context.attention was given {tokens} tokens, and it wants this rank's share of a sequence that is "
                f"divided over {self.size} ranks; shares so far: {known}. Divide the batch by ud.context.split first"
            )
        return zigzag(tokens * self.size, self.size)

    def compare(self, arrays: Sequence[Any]) -> None:
        """Compare what the ranks have been given, once. Collective."""
        if not self._compares or not arrays:
            return
        self._compares = False
        operation = EqualInputs(self._cell, AXIS)
        if any(isinstance(each, jax.core.Tracer) for each in arrays):
            bind(operation, [jnp.asarray(each) for each in arrays])
        else:
            operation.run_at_once([np.asarray(each) for each in arrays])

    # With gradients

    def summed(self, array: Any) -> Any:
        """Return the sum over all ranks."""
        return _paired(self._sum, self._sum)(array)

    def gathered(self, array: Any, layout: SequenceLayout, dim: int) -> Any:
        """Return the tokens of all ranks along a dim, in their order."""
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            return self._gather(array, layout, dim)
        return _paired(lambda x: self._gather(x, layout, dim), lambda x: self._scatter(x, layout, dim))(array)

    def to_heads(self, rows: Any, layout: SequenceLayout) -> Any:
        """Return this rank's heads of all tokens, from all heads of its tokens `(batch, tokens, heads, width)`."""
        return _paired(lambda x: self._to_heads(x, layout), lambda x: self._to_rows(x, layout))(rows)

    def to_rows(self, heads: Any, layout: SequenceLayout) -> Any:
        """Return all heads of this rank's tokens, from this rank's heads of all tokens."""
        return _paired(lambda x: self._to_rows(x, layout), lambda x: self._to_heads(x, layout))(heads)

    # Without gradients

    def shift(self, arrays: Sequence[Any], rows: int, after: Sequence[Any]) -> list[Any]:
        """See `unidist_context_parallel.attention.ring.Shift`."""
        if after:
            arrays = jax.lax.optimization_barrier((*arrays, *after))[: len(arrays)]
        return bind(_Shift(self._cell), arrays)

    @property
    def _cell(self) -> Cell[Communicator]:
        if self._found is None:
            raise UsageError(
                f"context={self.size} has no model yet: make TrainStep(loss_fn, params, optimizer), or call "
                "ud.distribute(params, optimizer), before a sequence is divided"
            )
        return self._found

    def _sum(self, array: Any) -> Any:
        (result,) = bind(_Sum(self._cell), [array])
        return result

    def _gather(self, array: Any, layout: SequenceLayout, dim: int) -> Any:
        (rows,) = bind(_Gather(self._cell), [jnp.moveaxis(array, dim, 0)])
        return jnp.moveaxis(rows[layout.gathered_order()], 0, dim)

    def _scatter(self, array: Any, layout: SequenceLayout, dim: int) -> Any:
        (rows,) = bind(_Scatter(self._cell), [jnp.moveaxis(array, dim, 0)[self._by_rank(layout)]])
        return jnp.moveaxis(rows, 0, dim)

    def _to_heads(self, x: Any, layout: SequenceLayout) -> Any:
        batch, rows, heads, width = x.shape
        own = heads // self.size
        source = x.reshape(batch, rows, self.size, own, width).transpose(2, 1, 0, 3, 4)
        (target,) = bind(_AllToAll(self._cell), [source])
        return target.reshape(layout.size, batch, own, width)[layout.gathered_order()].transpose(1, 0, 2, 3)

    def _to_rows(self, x: Any, layout: SequenceLayout) -> Any:
        batch, tokens, own, width = x.shape
        source = x.transpose(1, 0, 2, 3)[self._by_rank(layout)]
        (target,) = bind(_AllToAll(self._cell), [source.reshape(self.size, tokens // self.size, batch, own, width)])
        return target.transpose(2, 1, 0, 3, 4).reshape(batch, tokens // self.size, self.size * own, width)

    def _by_rank(self, layout: SequenceLayout) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.concatenate([layout.positions(rank) for rank in range(self.size)])


def current_axis() -> JaxAxis:
    """Return the axis of this process's runtime."""
    return context.current().owned(JaxAxis)


def _paired(forward: Any, backward: Any) -> Any:
    """Return a function with another one as that of its gradient."""

    @jax.custom_vjp
    def function(x: Any) -> Any:
        return forward(x)

    function.defvjp(lambda x: (forward(x), None), lambda _, gradient: (backward(gradient),))
    return function


class _AxisOperation(HostOperation):
    can_be_batched: ClassVar[bool] = False

    def __init__(self, cell: Cell[Communicator]) -> None:
        self._cell = cell

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return list(operands)


class _Sum(_AxisOperation):
    @property
    @override
    def title(self) -> str:
        return "a sum over the axis 'context'"

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        self._cell.value.allreduce(buffer_of_array(operands[0]), buffer_of_array(results[0])).wait()


class _Shift(_AxisOperation):
    """Sends arrays to the next rank, and receives those of the rank before."""

    @property
    @override
    def title(self) -> str:
        return "the exchange of keys and values with the next rank on the axis 'context'"

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        communicator = self._cell.value
        works = []
        for source, target in zip(operands, results, strict=True):
            works.append(communicator.send(buffer_of_array(source), to=(communicator.rank + 1) % communicator.size))
            before = (communicator.rank - 1) % communicator.size
            works.append(communicator.recv(buffer_of_array(target), source=before))
        for work in works:
            work.wait()


class _AllToAll(_AxisOperation):
    """Exchanges the elements of dim 0, one for each rank."""

    @property
    @override
    def title(self) -> str:
        return "the exchange of tokens for heads over the axis 'context'"

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        source, target = buffer_of_array(operands[0]), buffer_of_array(results[0])
        size = self._cell.value.size
        counts = [source.count // size] * size
        self._cell.value.alltoall(source, target, send_counts=counts, receive_counts=counts).wait()


class _Gather(_AxisOperation):
    """The rows of all ranks, rank by rank."""

    @property
    @override
    def title(self) -> str:
        return "the gathering of tokens over the axis 'context'"

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        (rows,) = operands
        return [ShapeDtype((self._cell.value.size * rows.shape[0], *rows.shape[1:]), rows.dtype)]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        source = buffer_of_array(operands[0])
        counts = [source.count] * self._cell.value.size
        self._cell.value.allgather(source, buffer_of_array(results[0]), counts=counts).wait()


class _Scatter(_AxisOperation):
    """This rank's rows of the sum over the ranks, of rows that are ordered rank by rank."""

    @property
    @override
    def title(self) -> str:
        return "the sum of gradients of tokens over the axis 'context'"

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        (rows,) = operands
        return [ShapeDtype((rows.shape[0] // self._cell.value.size, *rows.shape[1:]), rows.dtype)]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        target = buffer_of_array(results[0])
        counts = [target.count] * self._cell.value.size
        self._cell.value.reducescatter(buffer_of_array(operands[0]), target, counts=counts).wait()
