"""Pipeline parallelism for Keras 3: divides a model, and makes the runner of a divided one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unidist_pipeline._keras.division import DIVISION, Cuts, Division, divide, model_to_fill
from unidist_pipeline._keras.runner import PipelineRunner
from unidist_pipeline.binding import KeepsStages, PipelineBinding

if TYPE_CHECKING:
    from unidist.optim.interface import MakesStepRunner
    from unidist.runtime_api import RuntimeAPI
    from unidist_pipeline.strategy import Pipeline


class KerasPipeline(PipelineBinding, KeepsStages):
    """See `PipelineBinding` and `KeepsStages`."""

    @override
    def partition(self, strategy: Pipeline, model: Any, context: RuntimeAPI) -> Any:
        return divide(strategy, model, context)

    @override
    def before_joining(self, model: Any) -> Any:
        return model_to_fill(model)

    @override
    def division(self, model: Any) -> Cuts:
        divided: Division = model.__dict__[DIVISION]
        return divided.cuts

    @override
    def rejoin(self, strategy: Pipeline, model: Any, context: RuntimeAPI, division: Cuts) -> Any:
        return divide(strategy, model, context, division)

    @override
    def step_runner(self, strategy: Pipeline) -> MakesStepRunner:
        return functools.partial(PipelineRunner, strategy)
