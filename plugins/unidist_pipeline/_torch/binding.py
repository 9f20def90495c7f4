"""Pipeline parallelism for PyTorch: divides a model, and makes the runner of a divided one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from unidist_pipeline._torch.model import Division
from unidist_pipeline._torch.model_programs import ModelPrograms
from unidist_pipeline._torch.runner import DividedModel, PipelineRunner
from unidist_pipeline.binding import PipelineBinding
from unidist_pipeline.strategy import AXIS
from unidist_torch.models.step_runner import LossFunction, StepRunner

if TYPE_CHECKING:
    from unidist.optim.interface import MakesStepRunner
    from unidist.runtime_api import RuntimeAPI
    from unidist_pipeline.strategy import Pipeline

_DIVIDED = "_unidist_pipeline"


class TorchPipeline(PipelineBinding):
    """See `PipelineBinding`."""

    def partition(self, strategy: Pipeline, model: torch.nn.Module, context: RuntimeAPI) -> torch.nn.Module:
        """Remove the parameters of other ranks' stages from the model; see `Strategy.partition`."""
        placement = strategy.build(context.plugins, 1).placement
        programs = ModelPrograms(model)
        uses: list[set[str]] = [set()]
        if len(placement) > 1:
            uses = [stage.attributes() for stage in programs.cut(model, strategy, len(placement), context).stages]
        division = Division(model, uses, placement)
        stages = [number for number, rank in enumerate(placement) if rank == context.axis_rank(AXIS)]
        programs.set_division(division, division.apply(model, stages))
        model.__dict__[_DIVIDED] = DividedModel(strategy, programs, division, stages)
        return model

    @override
    def step_runner(self, strategy: Pipeline) -> MakesStepRunner:
        def make(model: torch.nn.Module, loss_fn: LossFunction, optimizer: Any) -> StepRunner:
            return PipelineRunner(model.__dict__[_DIVIDED], model, loss_fn, optimizer)

        return make
