"""Pipeline parallelism for Keras 3: divides a model, and makes the runner of a divided one."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from unidist_pipeline._keras.division import divide
from unidist_pipeline._keras.runner import PipelineRunner
from unidist_pipeline.binding import PipelineBinding

if TYPE_CHECKING:
    from unidist.optim.interface import MakesStepRunner
    from unidist.runtime_api import RuntimeAPI
    from unidist_pipeline.strategy import Pipeline


class KerasPipeline(PipelineBinding):
    """See `PipelineBinding`."""

    def partition(self, strategy: Pipeline, model: Any, context: RuntimeAPI) -> Any:
        """See `PipelineBinding.partition`."""
        return divide(strategy, model, context)

    def step_runner(self, strategy: Pipeline) -> MakesStepRunner:
        """See `PipelineBinding.step_runner`."""
        return functools.partial(PipelineRunner, strategy)
