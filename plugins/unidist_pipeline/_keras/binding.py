"""Pipeline parallelism for Keras 3: what `strategy.HALVES` asks of a framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unidist_pipeline._keras.division import divide
from unidist_pipeline._keras.runner import PipelineRunner

if TYPE_CHECKING:
    from unidist.runtime.context import Context
    from unidist_pipeline.strategy import Pipeline


def partition(strategy: Pipeline, model: Any, context: Context) -> Any:
    """See `Strategy.partition`: a model of this rank's stages."""
    return divide(strategy, model, context)


def runner(strategy: Pipeline) -> Callable[[Any, Any, Any], PipelineRunner]:
    """See `RunsSteps.runner_for`."""

    def make(model: Any, loss_fn: Any, optimizer: Any) -> PipelineRunner:
        return PipelineRunner(strategy, model, loss_fn, optimizer)

    return make
