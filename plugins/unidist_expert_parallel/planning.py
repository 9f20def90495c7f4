"""Memory and time estimates of expert parallelism for the planner: see `unidist.cost_model.divided_experts`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from unidist.cost_model import RemainingRanks, SearchProblem, divided_experts, divisors, expert_memory
from unidist.errors import ConfigurationError

if TYPE_CHECKING:
    from unidist.cost_model import ModelFigures, RankMemory, RankStep

AXIS = "expert"


def predicted(step: RankStep, num_ranks: int, problem: SearchProblem) -> RankStep:
    """Return the step with the experts of each block divided; see `PredictsStepTime.predict`.

    Raises:
        ConfigurationError: the number of experts does not divide.
    """
    work = problem.work
    if work.experts % num_ranks:
        raise ConfigurationError(
            f"expert={num_ranks}: {work.experts} experts in each block do not divide over so many ranks. Use a divisor."
        )
    return divided_experts(step, AXIS, num_ranks, work.workload(1).model, work.top_k)


def estimated(memory: RankMemory, num_ranks: int, model: ModelFigures) -> RankMemory:
    """Return what a rank holds of divided experts; see `EstimatesMemory.estimate`."""
    return expert_memory(memory, num_ranks, model)


def proposed(remaining: RemainingRanks) -> Sequence[str]:
    """Return the sizes that divide the ranks and the experts, if there are several in a block."""
    return [f"expert={size}" for size in divisors(math.gcd(remaining.ranks, remaining.problem.work.experts))[1:]]
