"""The strategy `sample-compress=bfloat16`: float32 gradients travel in 16 bits, half the bytes.

Each rank rounds its gradients to the nearest 16-bit number, the engine adds those up, and the sum is widened
again: an error of at most 2^-9 (bfloat16) or 2^-12 (float16) of each summand, and once more of the sum.
float16 overflows above 65504; bfloat16 has the range of float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from unidist.buffer import HOST, Buffer, DType
from unidist.errors import ConfigurationError
from unidist.gradients.allreduce import AllReduceExchange
from unidist.gradients.buckets import ParameterInfo
from unidist.gradients.interface import NO_NOTICE, GradientExchange, ReducedGradients, RoundResult
from unidist.mesh import DATA_AXIS
from unidist.strategy.interface import GradientOwner, Strategy

if TYPE_CHECKING:
    from unidist.framework import Framework
    from unidist.gradients.options import ExchangeOptions
    from unidist.runtime_api import RuntimeAPI


@dataclass(frozen=True)
class CompressedData(Strategy, GradientOwner):
    """Data parallelism whose float32 gradients are exchanged in 16 bits. Gradients of other types travel as they are.

    Args:
        dtype: what they travel as.
    """

    name: ClassVar[str] = "sample-compress"
    axis: ClassVar[str | None] = DATA_AXIS
    axis_order: ClassVar[int] = 50

    dtype: Literal["bfloat16", "float16"] = "bfloat16"

    def make_exchange(
        self, parameters: Sequence[ParameterInfo], context: RuntimeAPI, framework: Framework, options: ExchangeOptions
    ) -> GradientExchange:
        """See `GradientOwner.make_exchange`."""
        options.check_supported_by(self.name)
        for parameter in parameters:
            if parameter.memory != HOST:
                raise ConfigurationError(
                    f"strategy {self.name!r} compresses gradients in host memory, but {parameter.name!r} is in "
                    f"{parameter.memory} memory. Keep the model on the CPU, or use the strategy 'data'."
                )
        wire = [replace(each, dtype=DType(self.dtype)) if _narrows(each) else each for each in parameters]
        inner = AllReduceExchange(wire, framework=framework, host=context.new_communicator(DATA_AXIS))
        return CompressedExchange(parameters, inner)


class CompressedExchange(GradientExchange):
    """Wide gradients in front of an exchange of narrow ones.

    Args:
        parameters: as the framework has them.
        inner: exchanges the same parameters, with 16-bit types for those that are compressed; closed with this.
    """

    def __init__(self, parameters: Sequence[ParameterInfo], inner: GradientExchange) -> None:
        self.parameters = tuple(parameters)
        self._inner = inner
        self._wide = {
            index: Buffer.allocate(each.count, each.dtype)
            for index, each in enumerate(self.parameters)
            if each.dtype is not inner.parameters[index].dtype
        }
        self._held: set[int] = set()

    def buffer(self, index: int) -> Buffer:
        """See `GradientExchange.buffer`."""
        return self._wide[index] if index in self._wide else self._inner.buffer(index)

    @property
    def in_round(self) -> bool:
        """See `GradientExchange.in_round`."""
        return bool(self._held) or self._inner.in_round

    def ready(self, index: int) -> None:
        """See `GradientExchange.ready`."""
        self._held.discard(index)  # after this the inner buffer belongs to the engine: it is written once
        self._inner.scale = self.scale
        if index in self._wide:
            self._narrow(index)
        self._inner.ready(index)

    def accumulate(self, index: int) -> None:
        """See `GradientExchange.accumulate`. What is held may still grow, so it is rounded only at the end."""
        self._held.add(index)

    def finish(self, *, scale: float | None = None, notice: bytes = NO_NOTICE) -> RoundResult:
        """See `GradientExchange.finish`."""
        self._inner.scale = self.scale
        for index in sorted(self._held):
            self._narrow(index)
            self._inner.accumulate(index)
        self._held.clear()
        result = self._inner.finish(scale=scale, notice=notice)
        for index, wide in self._wide.items():
            if result.present[index] and wide.count:
                widen(self._inner.buffer(index), wide)
        return result

    def reduced(self) -> ReducedGradients:
        """See `GradientExchange.reduced`."""
        return ReducedGradients(tuple(self.buffer(index) for index in range(len(self.parameters))))

    def close(self) -> None:
        """See `GradientExchange.close`."""
        self._wide.clear()
        self._inner.close()

    def _narrow(self, index: int) -> None:
        if index in self._wide and self.parameters[index].count:
            narrow(self._wide[index], self._inner.buffer(index))


def narrow(source: Buffer, target: Buffer) -> None:
    """Round float32 elements to the nearest bfloat16 or float16, ties to even."""
    import numpy as np

    if target.dtype is DType.FLOAT16:
        with np.errstate(over="ignore"):  # becomes infinite, which an overflow check shall find
            np.frombuffer(target.bytes(), np.float16)[:] = np.frombuffer(source.bytes(), np.float32)
        return
    bits = np.frombuffer(source.bytes(), np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000  # rounding could turn one into infinity
    np.frombuffer(target.bytes(), np.uint16)[:] = np.where(is_nan, (bits >> 16) | 0x40, rounded)


def widen(source: Buffer, target: Buffer) -> None:
    """Turn bfloat16 or float16 elements into the same float32 numbers."""
    import numpy as np

    if source.dtype is DType.FLOAT16:
        np.frombuffer(target.bytes(), np.float32)[:] = np.frombuffer(source.bytes(), np.float16)
        return
    np.frombuffer(target.bytes(), np.uint32)[:] = np.frombuffer(source.bytes(), np.uint16).astype(np.uint32) << 16


def _narrows(parameter: ParameterInfo) -> bool:
    return parameter.dtype is DType.FLOAT32
