"""Memory and time estimates of tensor parallelism for the planner: each block is cut, and its parts are summed.

Shoeybi et al. 2019 (https://arxiv.org/abs/1909.08053), section 3: a block costs two all-reduces of its output in the
forward pass and two in the backward pass. What is between the cut layers (norms, dropout, the residual) every rank
computes and keeps whole, unless it is cut along the sequence (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198,
section 4.2): then a reduce-scatter and an all-gather take the place of each all-reduce and move as much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from unidist.cost_model.step import Exchange, Moment, Operation, RankStep
from unidist.cost_model.step_interface import RemainingRanks, SearchProblem, divisors
from unidist.errors import ConfigurationError

if TYPE_CHECKING:
    from unidist.cost_model.memory import RankMemory

AXIS = "tensor"
_WHOLE, _CUT = 10, 24
"""Of what a block keeps, so many parts stay whole on each rank, so many are cut: equation 2 of Korthikanti et al."""


def predicted(step: RankStep, num_ranks: int, problem: SearchProblem, *, cuts_sequence: bool = False) -> RankStep:
    """Return the step with every block cut over `num_ranks`; see `PredictsStepTime.predict`.

    Raises:
        ConfigurationError: there are more ranks than heads.
    """
    for name, number in problem.work.divides.items():
        if number < num_ranks:
            raise ConfigurationError(f"tensor={num_ranks}: the model has only {number} {name}. Use a smaller size.")
    step = step.divided(num_ranks, traffic=_kept(num_ranks, cuts_sequence))
    if cuts_sequence:
        step = replace(step, passed=step.passed / num_ranks)
    operations: tuple[Operation, ...] = ("allgather", "reducescatter") if cuts_sequence else ("allreduce",)
    moments: tuple[Moment, ...] = ("forward", "backward")
    return step.exchanging(
        *(
            Exchange("parts of blocks", each, AXIS, "border", moment, count=2)
            for moment in moments
            for each in operations
        )
    )


def estimated(memory: RankMemory, num_ranks: int, *, cuts_sequence: bool = False) -> RankMemory:
    """Return what a rank holds of cut blocks; see `EstimatesMemory.estimate`."""
    memory = memory.split(num_ranks, "parameters", "gradients", "master", "optimizer")
    share = memory.activations.share * _kept(num_ranks, cuts_sequence)
    return replace(memory, activations=replace(memory.activations, share=share))


def proposed(remaining: RemainingRanks) -> Sequence[str]:
    """Return the sizes that fit in one host and divide heads and width of the model."""
    problem = remaining.problem
    largest = math.gcd(remaining.ranks, problem.cluster.ranks_per_host, *problem.work.divides.values())
    return [f"tensor={size}" for size in divisors(largest)[1:]]


def _kept(num_ranks: int, cuts_sequence: bool) -> float:
    return 1 / num_ranks if cuts_sequence else (_WHOLE + _CUT / num_ranks) / (_WHOLE + _CUT)
