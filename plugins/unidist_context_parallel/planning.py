"""Memory and time estimates of context parallelism for the planner: see `unidist.cost_model.divided_sequence`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from unidist.cost_model import RemainingRanks, SearchProblem, divided_sequence, divisors, sequence_memory
from unidist.errors import ConfigurationError

if TYPE_CHECKING:
    from unidist.cost_model import RankMemory, RankStep

AXIS = "context"
_FEWEST_TOKENS = 2048
"""A search gives no rank fewer tokens of a sample: its matrices would be small, and there is nothing to gain."""


def predicted(
    step: RankStep, num_ranks: int, problem: SearchProblem, exchange: Literal["ring", "gather", "ulysses"] = "ring"
) -> RankStep:
    """Return the step with the tokens of each sample divided; see `PredictsStepTime.predict`.

    Args:
        step: without.
        num_ranks: ranks that divide the sequence.
        problem: model and machines.
        exchange: how attention reaches the keys and values of other ranks.

    Raises:
        ConfigurationError: the sequence does not divide, or there are fewer heads than Ulysses has ranks.
    """
    sequence, heads = problem.work.sequence, min(problem.work.divides.values(), default=num_ranks)
    if sequence and sequence % (2 * num_ranks):
        raise ConfigurationError(
            f"context={num_ranks}: a sequence of {sequence} tokens does not divide into {2 * num_ranks} equal pieces, "
            "two for each rank. Use another length, or fewer ranks."
        )
    if exchange == "ulysses" and heads % num_ranks:
        raise ConfigurationError(f"context={num_ranks}: {heads} heads do not divide over so many ranks. Use the ring.")
    return divided_sequence(step, AXIS, num_ranks, exchange)


def estimated(memory: RankMemory, num_ranks: int) -> RankMemory:
    """Return what a rank holds of divided sequences; see `EstimatesMemory.estimate`."""
    return sequence_memory(memory, num_ranks)


def proposed(remaining: RemainingRanks) -> Sequence[str]:
    """Return the sizes that divide the ranks and the sequence, and leave a rank enough tokens to be worth it."""
    sequence = remaining.problem.work.sequence
    most = math.gcd(remaining.ranks, sequence // 2) if sequence else 1
    return [f"context={size}" for size in divisors(most)[1:] if sequence // size >= _FEWEST_TOKENS]
