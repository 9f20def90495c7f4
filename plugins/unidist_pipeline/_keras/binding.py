"""Pipeline parallelism for Keras 3: divides a model, and makes the runner of a divided one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unidist_pipeline._keras.division import divide
from unidist_pipeline._keras.runner import PipelineRunner
from unidist_pipeline.binding import PipelineBinding

if TYPE_CHECKING:
    from unidist.optim.interface import MakesStepRunner
    from unidist.runtime_api import RuntimeAPI
    from unidist_pipeline.strategy import Pipeline


class KerasPipeline(PipelineBinding):
    """See `PipelineBinding`."""

    @override
    def partition(self, strategy: Pipeline, model: Any, context: RuntimeAPI) -> Any:
        return divide(strategy, model, context)

    @override
    def step_runner(self, strategy: Pipeline) -> MakesStepRunner:
        return functools.partial(PipelineRunner, strategy)
