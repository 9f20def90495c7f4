"""An exchange of gradients with nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unidist.buffer import Buffer
from unidist.gradients.buckets import ParameterInfo
from unidist.gradients.interface import NO_NOTICE, GradientExchange, ReducedGradients, RoundResult


class FakeExchange(GradientExchange):
    """Writes down what it is told."""

    def __init__(self, parameters: Sequence[ParameterInfo]) -> None:
        self.parameters = tuple(parameters)
        self.calls: list[Any] = []
        self.error: Exception | None = None
        self._buffers = [Buffer.allocate(item.count, item.dtype) for item in parameters]

    def buffer(self, index: int) -> Buffer:
        return self._buffers[index]

    def ready(self, index: int, source: Buffer | None = None) -> None:
        self.calls.append(("ready", index))

    def accumulate(self, index: int) -> None:
        self.calls.append(("accumulate", index))

    def finish(self, *, scale: float | None = None, notice: bytes = NO_NOTICE) -> RoundResult:
        if self.error is not None:
            raise self.error
        self.calls.append(("finish", scale, notice[0]))
        return RoundResult((True,) * len(self.parameters), notice)

    def reduced(self) -> ReducedGradients:
        return ReducedGradients(tuple(self._buffers))

    @property
    def in_round(self) -> bool:
        return bool(self.calls)

    def close(self) -> None:
        self.calls.append("close")
