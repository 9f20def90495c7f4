"""Pipeline parallelism for PyTorch: divides a model, and makes the runner of a divided one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from unidist_pipeline._torch.model import Division
from unidist_pipeline._torch.model_programs import Chosen, ModelPrograms
from unidist_pipeline._torch.runner import DividedModel, PipelineRunner
from unidist_pipeline._torch.tracing.program import Program
from unidist_pipeline.binding import KeepsStages, PipelineBinding
from unidist_pipeline.strategy import AXIS
from unidist_torch.models.step_runner import LossFunction, StepRunner

if TYPE_CHECKING:
    from unidist.optim.interface import MakesStepRunner
    from unidist.runtime_api import RuntimeAPI
    from unidist_pipeline.strategy import Pipeline

_DIVIDED = "_unidist_pipeline"


class TorchPipeline(PipelineBinding, KeepsStages):
    """See `PipelineBinding` and `KeepsStages`."""

    def partition(self, strategy: Pipeline, model: torch.nn.Module, context: RuntimeAPI) -> torch.nn.Module:
        """Remove the parameters of other ranks' stages from the model; see `Strategy.partition`."""
        placement = strategy.build(context.plugins, 1).placement
        programs = ModelPrograms(model)
        program = programs.cut(model, strategy, len(placement), context) if len(placement) > 1 else None
        return self._divided(strategy, model, context, placement, programs, program)

    @override
    def division(self, model: torch.nn.Module) -> Chosen:
        divided: DividedModel = model.__dict__[_DIVIDED]
        return divided.programs.chosen

    @override
    def rejoin(
        self, strategy: Pipeline, model: torch.nn.Module, context: RuntimeAPI, division: Chosen
    ) -> torch.nn.Module:
        placement = strategy.build(context.plugins, 1).placement
        programs = ModelPrograms(model)
        program = programs.cut_as(model, strategy, division) if len(placement) > 1 else None
        return self._divided(strategy, model, context, placement, programs, program)

    def _divided(
        self,
        strategy: Pipeline,
        model: torch.nn.Module,
        context: RuntimeAPI,
        placement: Sequence[int],
        programs: ModelPrograms,
        program: Program | None,
    ) -> torch.nn.Module:
        uses = [set[str]()] if program is None else [stage.attributes() for stage in program.stages]
        device = next((each.device for each in model.parameters() if not each.is_meta), torch.device("cpu"))
        division = Division(model, uses, placement)
        stages = [number for number, rank in enumerate(placement) if rank == context.axis_rank(AXIS)]
        programs.set_division(division, division.apply(model, stages))
        model.__dict__[_DIVIDED] = DividedModel(strategy, programs, division, stages, device)
        return model

    @override
    def step_runner(self, strategy: Pipeline) -> MakesStepRunner:
        def make(model: torch.nn.Module, loss_fn: LossFunction, optimizer: Any) -> StepRunner:
            return PipelineRunner(model.__dict__[_DIVIDED], model, loss_fn, optimizer)

        return make
