"""Plain data parallelism: every rank holds the whole model, gradients are averaged by all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unidist.buffer import HOST
from unidist.errors import ConfigurationError
from unidist.gradients import AllReduceExchange, GradientExchange
from unidist.mesh import DATA_AXIS
from unidist.strategy import GradientOwner, Plan, Strategy

if TYPE_CHECKING:
    from unidist.buckets import ParameterInfo
    from unidist.context import Context
    from unidist.framework import Framework


@dataclass(frozen=True)
class DataParallel(Strategy, GradientOwner):
    """Averages gradients over the data axis.

    Args:
        size: ranks on the data axis; default: all that the other axes leave over.
        bucket_mb: size of a gradient bucket in MiB; default: what suits the engine.
        overlap: exchange buckets while backward runs; False waits for the step, and allows any number of backward
            passes before it.
    """

    name: ClassVar[str] = "data"
    axis: ClassVar[str | None] = DATA_AXIS
    axis_order: ClassVar[int] = 50

    size: int | None = None
    bucket_mb: float | None = None
    overlap: bool = True

    @property
    def axis_size(self) -> int | None:
        """See `Strategy.axis_size`."""
        return self.size

    def validate(self, plan: Plan) -> None:
        """The bucket size must be positive."""
        if self.bucket_mb is not None and self.bucket_mb <= 0:
            raise ConfigurationError(f"data:bucket_mb={self.bucket_mb:g}: give a size above 0, in MiB")

    @property
    def completes_in_backward(self) -> bool:
        """See `GradientOwner.completes_in_backward`."""
        return self.overlap

    def make_exchange(
        self, parameters: Sequence[ParameterInfo], context: Context, framework: Framework
    ) -> GradientExchange:
        """See `GradientOwner.make_exchange`."""
        on_device = any(parameter.memory != HOST for parameter in parameters)
        return AllReduceExchange(
            parameters,
            framework=framework,
            host=context.new_communicator(DATA_AXIS),
            device=context.new_communicator(DATA_AXIS, memory="cuda") if on_device else None,
            bucket_bytes=int(self.bucket_mb * 2**20) if self.bucket_mb is not None else None,
            overlap=self.overlap,
            timeline=context.timeline,
        )
