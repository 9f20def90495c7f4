"""Pipeline parallelism for JAX: what a rank holds, and the runner of steps."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist_pipeline._jax.parameters import StagedParameters
from unidist_pipeline._jax.runner import PipelineRunner
from unidist_pipeline.binding import PipelineBinding

if TYPE_CHECKING:
    from unidist.optim.interface import MakesStepRunner
    from unidist.runtime_api import RuntimeAPI
    from unidist_pipeline.strategy import Pipeline


class JaxPipeline(PipelineBinding):
    """See `PipelineBinding`."""

    @override
    def partition(self, strategy: Pipeline, model: Any, context: RuntimeAPI) -> Any:
        axis = strategy.axis or ""
        if strategy.balance != "parameters" or strategy.example is not None:
            raise ConfigurationError(
                f"pipeline={strategy.stages}: balance={strategy.balance} and example= are not for JAX, where the first "
                "batch shows the stages, and nothing is measured. Leave them out, or name the places with split="
            )
        others = [name for name in context.mesh.model_axes if name != axis]
        if others:
            raise ConfigurationError(
                f"pipeline and {' and '.join(others)} do not go together with JAX; use one of them"
            )
        return StagedParameters(model, context, axis)

    @override
    def step_runner(self, strategy: Pipeline) -> MakesStepRunner:
        make: Any = functools.partial(PipelineRunner, strategy)
        return make  # a runner of this adapter, whose `run` takes and returns trees
