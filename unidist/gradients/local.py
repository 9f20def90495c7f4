"""An exchange that exchanges nothing: each rank keeps its own gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from unidist.buffer import Buffer, DType
from unidist.gradients.buckets import ParameterInfo, plan_buckets
from unidist.gradients.interface import NO_NOTICE, GradientExchange, ReducedGradients, RoundResult

if TYPE_CHECKING:
    from unidist.framework import Framework

_WHOLE = 2**62
"""Bytes of a bucket: all gradients of a type are one piece of memory."""


class LocalExchange(GradientExchange):
    """Gives each rank its own gradients, scaled as the mean over its own passes.

    For strategies that exchange something else than gradients, or exchange them in their inner step. No rank waits for
    another one.

    Args:
        parameters: of the gradients.
        framework: allocates the memory, and multiplies.
        num_ranks: `scale` has this divisor, which makes a mean of a sum over the ranks; it is taken out again. Where
            gradients are added up over the ranks, each rank has its own times this number, an estimate of the sum.
        allocate: allocates the memory instead, with the arguments of `Framework.allocate`; once for each type.
    """

    def __init__(
        self,
        parameters: Sequence[ParameterInfo],
        framework: Framework,
        num_ranks: int,
        *,
        allocate: Callable[[int, DType, str], Buffer] | None = None,
    ) -> None:
        self.parameters = tuple(parameters)
        self._framework = framework
        self._num_ranks = num_ranks
        self._memory: list[Buffer] = []
        self._copies: list[int] = []
        self._places: dict[int, Buffer] = {}
        for layout in plan_buckets(self.parameters, bucket_bytes=_WHOLE, first_bucket_bytes=_WHOLE):
            memory = (allocate or framework.allocate)(layout.count, layout.dtype, layout.memory)
            self._memory.append(memory)
            self._copies.append(layout.copies)
            self._places |= {slot.parameter: memory.slice(slot.offset, slot.count) for slot in layout.slots}
        self._written: set[int] = set()

    shares_notice = False

    @property
    @override
    def is_local(self) -> bool:
        return True

    @override
    def buffer(self, index: int) -> Buffer:
        return self._places[index]

    @override
    def ready(self, index: int) -> None:
        self._written.add(index)

    @override
    def accumulate(self, index: int) -> None:
        self._written.add(index)

    @override
    def finish(self, *, scale: float | None = None, notice: bytes = NO_NOTICE) -> RoundResult:
        factor = (self.scale if scale is None else scale) * self._num_ranks
        present = tuple(index in self._written for index in range(len(self.parameters)))
        for index, has_gradient in enumerate(present):
            if not has_gradient:
                self._framework.zero(self._places[index])  # norms are computed over all of the memory
        if factor != 1.0:
            for memory in self._memory:
                self._framework.multiply(memory, factor)
        self._written.clear()
        return RoundResult(present, notice)

    @override
    def reduced(self) -> ReducedGradients:
        """Return all of this rank's gradients: rules act on these."""
        return ReducedGradients(tuple(self._memory), copies=tuple(self._copies))

    @property
    @override
    def in_round(self) -> bool:
        return bool(self._written)

    @override
    def close(self) -> None:
        self._memory.clear()
        self._places.clear()
