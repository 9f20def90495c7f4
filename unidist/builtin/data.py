"""Plain data parallelism: every rank holds the whole model, gradients are averaged by all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from unidist.buffer import device_kind
from unidist.cost_model.step_interface import PredictsStepTime
from unidist.errors import ConfigurationError
from unidist.gradients.allreduce import AllReduceExchange
from unidist.gradients.compression import CompressorSpec, build_compressor
from unidist.gradients.interface import GradientExchange
from unidist.mesh import DATA_AXIS
from unidist.strategy.interface import GradientOwner, NamesPlugins, Plan, Strategy

if TYPE_CHECKING:
    from unidist.cost_model.step import RankStep
    from unidist.cost_model.step_interface import SearchProblem
    from unidist.framework import Framework
    from unidist.gradients.buckets import ParameterInfo
    from unidist.gradients.options import ExchangeOptions
    from unidist.runtime_api import Plugins, RuntimeAPI


@dataclass(frozen=True)
class DataParallel(Strategy, GradientOwner, NamesPlugins, PredictsStepTime):
    """Averages gradients over the data axis.

    Args:
        size: ranks on the data axis; default: all that the other axes leave over.
        bucket_mb: size of a gradient bucket in MiB; default: what suits the engine.
        overlap: exchange buckets while backward runs; False waits for the step, and allows any number of backward
            passes before it.
        compression: name of a registered compressor, and its options: "fp16", "powersgd/rank=2". What a script
            passes to `DistributedOptimizer` takes precedence. Default: none.
    """

    name: ClassVar[str] = "data"
    axis: ClassVar[str | None] = DATA_AXIS
    axis_order: ClassVar[int] = 50

    size: int | None = None
    bucket_mb: float | None = None
    overlap: bool = True
    compression: str | None = None

    @property
    @override
    def axis_size(self) -> int | None:
        return self.size

    @override
    def check_plugins(self, plugins: Plugins) -> None:
        if self.compression is not None:
            build_compressor(self.compression, plugins.registry(CompressorSpec))

    def validate(self, plan: Plan) -> None:
        """The bucket size must be positive."""
        if self.bucket_mb is not None and self.bucket_mb <= 0:
            raise ConfigurationError(f"data:bucket_mb={self.bucket_mb:g}: give a size above 0, in MiB")

    @override
    def predict(self, step: RankStep, plan: Plan, problem: SearchProblem) -> RankStep:
        from unidist.cost_model.exchange_cost import allreduced

        return allreduced(step, beside=self.overlap)

    @property
    @override
    def completes_in_backward(self) -> bool:
        return self.overlap

    @override
    def make_exchange(
        self, parameters: Sequence[ParameterInfo], context: RuntimeAPI, framework: Framework, options: ExchangeOptions
    ) -> GradientExchange:
        device = device_kind(parameter.memory for parameter in parameters)
        if options.compressor is None and self.compression is not None:
            options = replace(
                options, compressor=build_compressor(self.compression, context.plugins.registry(CompressorSpec))
            )
        return AllReduceExchange(
            parameters,
            framework=framework,
            host=options.communicator(context),
            device=None if device is None else options.communicator(context, memory=device),
            bucket_bytes=options.bucket_bytes or (int(self.bucket_mb * 2**20) if self.bucket_mb is not None else None),
            overlap=self.overlap,
            recorder=context.recorder,
            options=options,
        )
