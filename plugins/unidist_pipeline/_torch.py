"""The half of the strategy for PyTorch: where it begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from unidist_pipeline._torch_measure import held_bytes, measured_costs, seconds
from unidist_pipeline._torch_model import Division
from unidist_pipeline._torch_program import SplitPoint
from unidist_pipeline._torch_runner import DividedModel, PipelineRunner, bound_arguments
from unidist_pipeline._torch_split import find_points, parameter_costs, program_of
from unidist_pipeline._torch_trace import is_value, parameters_of, plain_forward
from unidist_pipeline.strategy import AXIS
from unidist_torch.step_runner import LossFunction, StepRunner

if TYPE_CHECKING:
    from unidist.context import Context
    from unidist_pipeline.strategy import Pipeline

_DIVIDED = "_unidist_pipeline"
MEASURES = {"time": seconds, "memory": held_bytes}
"""How the values of `balance` measure."""


def partition(strategy: Pipeline, model: torch.nn.Module, context: Context) -> torch.nn.Module:
    """Take out of the model what belongs to other ranks' stages; see `Strategy.partition`."""
    placement = strategy.build(context.plugins, 1).placement
    forward = plain_forward(model)
    defaults = {
        each.name: each.default
        for each in parameters_of(forward)
        if each.default is not each.empty and not is_value(each.default)
    }
    points: list[SplitPoint] = []
    looked_into: list[str] = []
    uses: list[set[str]] = [set()]
    if len(placement) > 1:
        constants, costs = defaults, parameter_costs(model)
        if strategy.balance != "parameters" and strategy.split is None:
            arguments = bound_arguments(forward, strategy.example)
            constants = {name: value for name, value in arguments.items() if not is_value(value)}
            costs = measured_costs(model, arguments, MEASURES[strategy.balance], context)
        points, looked_into = find_points(model, forward, constants, len(placement), strategy.split_points, costs)
        program = program_of(model, forward, defaults, points, looked_into)
        uses = [stage.attributes() for stage in program.stages]
    division = Division(model, uses, placement)
    stages = [number for number, rank in enumerate(placement) if rank == context.axis_rank(AXIS)]
    taken_out = division.apply(model, stages)
    model.__dict__[_DIVIDED] = DividedModel(strategy, forward, points, looked_into, division, taken_out, stages)
    return model


def runner(strategy: Pipeline) -> Callable[[torch.nn.Module, LossFunction, Any], StepRunner]:
    """Return what makes the runner of a divided model; see `RunsSteps.runner_for`."""

    def make(model: torch.nn.Module, loss_fn: LossFunction, optimizer: Any) -> StepRunner:
        return PipelineRunner(model.__dict__[_DIVIDED], model, loss_fn, optimizer)

    return make
