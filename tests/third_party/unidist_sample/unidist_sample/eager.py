"""The schedule `sample-eager`: one forward and one backward in turns, with twice as many forwards ahead as 1f1b has.

A message of a forward is under way while the rank that waits for it computes earlier micro-batches: slow messages cost
less time, and each rank holds up to twice as many micro-batches.
"""

from __future__ import annotations

from unidist.errors import ConfigurationError
from unidist_pipeline.schedules import Action, ActionKind, PipelineSize, Schedule, complete, round_robin


def eager(size: PipelineSize) -> Schedule:
    """Return the schedule for a size: what each rank computes, in order; `complete` puts the messages in."""
    if size.stages_per_rank != 1:
        raise ConfigurationError(f"sample-eager has one stage on each rank, not {size.stages_per_rank}.")
    compute = []
    for rank in range(size.num_ranks):
        num_ahead = min(2 * (size.num_ranks - 1 - rank), size.num_microbatches)
        actions = [Action(ActionKind.FORWARD, rank, each) for each in range(num_ahead)]
        for each in range(size.num_microbatches):
            if each + num_ahead < size.num_microbatches:
                actions.append(Action(ActionKind.FORWARD, rank, each + num_ahead))
            actions.append(Action(ActionKind.BACKWARD, rank, each))
        compute.append(actions)
    return complete("sample-eager", size, round_robin(size), compute)
