"""The exchange of gradients as operations that compiled programs call."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from unidist.algorithms import copy_memory
from unidist.errors import UsageError
from unidist.gradients.buckets import ParameterInfo
from unidist_arrays.fused_exchange import FusedExchange
from unidist_arrays.memory import Array, address_of
from unidist_jax.compiled import HostOperation, ShapeDtype, bind, flush, is_tracing

FLAG = ShapeDtype((), np.dtype(bool))
"""Whether a pass completed an update."""


class _Cell:
    """Holds an exchange for the operations of compiled programs, which are kept for ever, until it is released.

    Programs run after they were called, so an optimizer may be gone before the last one has run.
    """

    def __init__(self, exchange: FusedExchange) -> None:
        self.exchange: FusedExchange | None = exchange


_abandoned: list[_Cell] = []
"""Of optimizers that are no more. The collector may find that out on any thread, even on that of a program."""


def release_abandoned() -> None:
    """Release the exchanges of optimizers that are no more, when the programs that were called have ended."""
    if not _abandoned or is_tracing():
        return
    flush()
    while _abandoned:
        _abandoned.pop().exchange = None


class GradientLeaves:
    """The gradients of one optimizer, leaf by leaf, on their way out of a program and back.

    Args:
        exchange: of these leaves; a leaf's place is its position in the tree.
    """

    def __init__(self, exchange: FusedExchange) -> None:
        self._exchange = exchange
        self._cell = _Cell(exchange)
        weakref.finalize(self, _abandoned.append, self._cell).atexit = False

    @property
    def variables(self) -> Sequence[ParameterInfo]:
        """The leaves by place."""
        return self._exchange.variables

    @property
    def fused(self) -> FusedExchange:
        """The exchange itself, for operations of a strategy's own."""
        return self._exchange

    def take_early(self, places: Sequence[int], gradients: Sequence[Any]) -> list[Any]:
        """Hand some gradients over as soon as they are computed; returns them, to be given to `reduced`."""
        return bind(_TakeEarly(self._cell, places), gradients)

    def reduced(self, gradients: Sequence[Any], early: Sequence[int] = ()) -> tuple[Any, list[Any]]:
        """Complete a pass.

        Args:
            gradients: of all leaves, arrays or tracers.
            early: places that `take_early` has taken in this pass.

        Returns:
            Whether this pass completed an update, a bool scalar; and the reduced gradients, which have no meaning if
            it did not.
        """
        complete, *reduced = bind(_Reduce(self._cell, early), gradients)
        return complete, reduced


class _ExchangeOperation(HostOperation):
    can_be_batched: ClassVar[bool] = False

    def __init__(self, cell: _Cell) -> None:
        self._cell = cell

    @property
    def _exchange(self) -> FusedExchange:
        """The exchange; UsageError if it was released."""
        if self._cell.exchange is None:
            raise UsageError(
                "a compiled function runs the update of an optimizer that is no more: keep the optimizer as long as "
                "what was compiled with it"
            )
        return self._cell.exchange

    @property
    @override
    def title(self) -> str:
        return "the exchange of gradients by a distributed optimizer"


class _TakeEarly(_ExchangeOperation):
    def __init__(self, cell: _Cell, places: Sequence[int]) -> None:
        super().__init__(cell)
        self._places = tuple(places)

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return list(operands)

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        self._exchange.take(dict(zip(self._places, operands, strict=True)))
        for operand, result in zip(operands, results, strict=True):
            copy_array(result, operand)


class _Reduce(_ExchangeOperation):
    def __init__(self, cell: _Cell, early: Sequence[int]) -> None:
        super().__init__(cell)
        self._early = frozenset(early)

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return [FLAG, *operands]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        flag, *reduced = results
        own = {place: array for place, array in enumerate(operands) if place not in self._early}
        outcome = self._exchange.run(own)
        flag[...] = outcome.complete
        if not outcome.complete:
            return
        for gradient, result in zip(outcome.gradients, reduced, strict=True):
            if gradient is None:  # of no rank: all have joined
                result.fill(0)
            else:
                assert isinstance(gradient, np.ndarray)
                copy_array(result, gradient)
        self._exchange.update.applied()


def copy_array(target: Array, source: Array) -> None:
    """Copy an array into another one of its shape and dtype, past the caches; nothing where they are the same."""
    if address_of(target) == address_of(source):
        return
    if copy_memory is not None and target.nbytes:
        copy_memory(address_of(target), address_of(source), target.nbytes)
    else:
        np.copyto(target, source)
