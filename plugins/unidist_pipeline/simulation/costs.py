"""Costs of the actions of a schedule: time and memory, equal for all stages or one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from unidist.errors import ConfigurationError
from unidist_pipeline.schedules.model import Action, ActionKind, StageTimes

PerStage = float | Sequence[float]
"""One number for all stages, or one for each."""


@dataclass(frozen=True)
class Costs:
    """Times in any single unit; memory in any other.

    Args:
        forward: time of a forward.
        backward: time of a full backward.
        backward_weight: the part of `backward` spent on the gradient of the weights. Default: half of it.
        message: time from the end of an action until another rank has its result.
        reduce: time of the exchange of a stage's gradients. It overlaps with computing.
        gather: time until a stage's gathered parameters are available, likewise.
        activation: memory that a stage holds of a micro-batch from its forward to the end of its backward.
        kept_for_weight: the part of `activation` that is still held between the backward for the input and that for the
            weights.

    Raises:
        ConfigurationError: a number is negative or not finite, or a part larger than the whole.
    """

    forward: PerStage = 1.0
    backward: PerStage = 2.0
    backward_weight: PerStage | None = None
    message: float = 0.0
    reduce: PerStage = 0.0
    gather: PerStage = 0.0
    activation: PerStage = 1.0
    kept_for_weight: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            for number in _numbers(value):
                if not math.isfinite(number) or number < 0:
                    raise ConfigurationError(f"a pipeline's cost {name}={number:g}: it must be 0 or more, and finite.")
        if self.kept_for_weight > 1:
            raise ConfigurationError(f"kept_for_weight={self.kept_for_weight:g} is a part of 1.")

    def for_stages(self, num_stages: int) -> StageCosts:
        """Return the costs of `num_stages` stages; raises ConfigurationError where a list has another length."""
        lists: dict[str, list[float]] = {}
        for name in ("forward", "backward", "backward_weight", "reduce", "gather", "activation"):
            value = getattr(self, name)
            if value is None:
                continue
            numbers = _numbers(value)
            if len(numbers) not in (1, num_stages):
                raise ConfigurationError(
                    f"{name} has {len(numbers)} numbers, but the pipeline {num_stages} stages; give one number, or one "
                    "for each stage."
                )
            lists[name] = numbers if len(numbers) == num_stages else numbers * num_stages
        weights = lists.setdefault("backward_weight", [time / 2 for time in lists["backward"]])
        for stage, (whole, part) in enumerate(zip(lists["backward"], weights, strict=True)):
            if part > whole:
                raise ConfigurationError(
                    f"stage {stage}: backward_weight={part:g} is a part of backward={whole:g} and cannot be larger."
                )
        return StageCosts(self, lists)

    def mean_times(self, num_stages: int) -> StageTimes:
        """Return the mean of the stages, for a schedule that is searched; errors as of `for_stages`."""
        stages = self.for_stages(num_stages)

        def mean(kind: ActionKind) -> float:
            return sum(stages.duration(Action(kind, stage, 0)) for stage in range(num_stages)) / num_stages

        return StageTimes(
            mean(ActionKind.FORWARD),
            mean(ActionKind.BACKWARD_INPUT),
            mean(ActionKind.BACKWARD_WEIGHT),
            self.message,
            self.kept_for_weight,
        )


class StageCosts:
    """The costs of a pipeline with a certain number of stages; made by `Costs.for_stages`."""

    def __init__(self, costs: Costs, lists: dict[str, list[float]]) -> None:
        self.costs = costs
        self.activation = tuple(lists["activation"])
        whole, weights = lists["backward"], lists["backward_weight"]
        self._times = {
            ActionKind.FORWARD: lists["forward"],
            ActionKind.BACKWARD: whole,
            ActionKind.BACKWARD_INPUT: [a - b for a, b in zip(whole, weights, strict=True)],
            ActionKind.BACKWARD_WEIGHT: weights,
            ActionKind.REDUCE: lists["reduce"],
            ActionKind.GATHER: lists["gather"],
        }

    def duration(self, action: Action) -> float:
        """Return the time of an action; of a message, the time that it is under way."""
        times = self._times.get(action.kind)
        return self.costs.message if times is None else times[action.stage]


def _numbers(value: PerStage | None) -> list[float]:
    if value is None:
        return []
    return [float(value)] if isinstance(value, int | float) else [float(number) for number in value]
