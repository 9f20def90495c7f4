"""The exchange of gradients as operations that compiled programs call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np
from typing_extensions import override

from unidist.algorithms import copy_memory
from unidist.gradients.buckets import ParameterInfo
from unidist_arrays.fused_exchange import FusedExchange
from unidist_arrays.memory import Array, address_of
from unidist_jax.compiled import HostOperation, ShapeDtype, bind
from unidist_jax.optimizer.cell import Cell

if TYPE_CHECKING:
    from unidist.optim.update import Update

_EARLY_BYTES = 4 << 20
"""Gradients are handed over in the backward pass in groups of this size: a call into Python for each costs 50 us."""

FLAG = ShapeDtype((), np.dtype(bool))
"""Whether a pass completed an update."""


class GradientLeaves:
    """The gradients of one optimizer, leaf by leaf, on their way out of a program and back.

    Args:
        exchange: of these leaves; a leaf's place is its position in the tree.
    """

    def __init__(self, exchange: FusedExchange) -> None:
        self._exchange = exchange
        self._cell = Cell(exchange, self)
        self._groups = _groups(exchange.variables)

    @property
    def variables(self) -> Sequence[ParameterInfo]:
        """The leaves by place."""
        return self._exchange.variables

    @property
    def fused(self) -> FusedExchange:
        """The exchange itself, for the operations of a strategy, which refer to it by a `Cell`."""
        return self._exchange

    def handing_over(self, values: Sequence[Any]) -> list[Any]:
        """Return what a loss is computed of, so that gradients are handed over once the backward pass has them.

        Args:
            values: of all leaves, by place, of which gradients are taken. Those gradients are given to `reduced`, as
                they are, with `early=range(len(values))`.
        """
        handing = list(values)
        for places in self._groups:

            @jax.custom_vjp
            def same(*group: Any) -> tuple[Any, ...]:
                return group

            def backward(_: None, gradients: tuple[Any, ...], places: Sequence[int] = places) -> tuple[Any, ...]:
                return tuple(self.take_early(places, gradients))

            same.defvjp(lambda *group: (group, None), backward)
            for place, value in zip(places, same(*(values[place] for place in places)), strict=True):
                handing[place] = value
        return handing

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
        *reduced, complete = bind(_Reduce(self._cell, early), gradients)
        return complete, reduced


class _ExchangeOperation(HostOperation):
    can_be_batched: ClassVar[bool] = False

    def __init__(self, cell: Cell[FusedExchange]) -> None:
        self._cell = cell

    @property
    def _exchange(self) -> FusedExchange:
        return self._cell.value

    @property
    @override
    def title(self) -> str:
        return "the exchange of gradients by a distributed optimizer"


class _TakeEarly(_ExchangeOperation):
    def __init__(self, cell: Cell[FusedExchange], places: Sequence[int]) -> None:
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
    def __init__(self, cell: Cell[FusedExchange], early: Sequence[int]) -> None:
        super().__init__(cell)
        self._early = frozenset(early)

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return [*operands, FLAG]  # each gradient at its own place, so that it gets the memory of this rank's

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        *reduced, flag = results
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


class UpdateNumber(HostOperation):
    """Tells the number of updates that were made: in a program behind `reduced`, with the present one.

    Args:
        cell: what counts them.
    """

    can_be_batched: ClassVar[bool] = False

    def __init__(self, cell: Cell[Update]) -> None:
        self._cell = cell

    @property
    @override
    def title(self) -> str:
        return "the number of an update"

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return [ShapeDtype((), np.dtype(np.uint32))]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        results[0][...] = self._cell.value.step


def _groups(leaves: Sequence[ParameterInfo]) -> list[list[int]]:
    """Return groups of places whose gradients are handed over together, the last parameters first."""
    groups: list[list[int]] = [[]]
    nbytes = 0
    for place, leaf in reversed(list(enumerate(leaves))):
        if nbytes >= _EARLY_BYTES:
            groups.append([])
            nbytes = 0
        groups[-1].append(place)
        nbytes += leaf.count * leaf.dtype.itemsize
    return [sorted(group) for group in groups if group]


def copy_array(target: Array, source: Array) -> None:
    """Copy an array into another one of its shape and dtype, past the caches; nothing where they are the same."""
    if address_of(target) == address_of(source):
        return
    if copy_memory is not None and target.nbytes:
        copy_memory(address_of(target), address_of(source), target.nbytes)
    else:
        np.copyto(target, source)
