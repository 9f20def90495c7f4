"""Zero-bubble schedules with one stage on each rank (Qi et al. 2023, arXiv:2401.10241, sections 2 and 4).

A backward is cut in two: the gradient of the input, for which the stage before waits, and that of the weights, for
which nobody waits: it fills what would be idle time. Durations F, B and W of forward, backward for the input and for
the weights:

| | longest idle time of a rank between its first and last action | micro-batches held |
|---|---|---|
| 1f1b | (p-1)(F+B+W) | p |
| zb-h1 | (p-1)(F+B-W) | p |
| zb-h2 | (p-1)(F+B-2W) | 2p-1 |

It holds from p (zb-h1) or 2p-1 (zb-h2) micro-batches on.
"""

from __future__ import annotations

from unidist.errors import ConfigurationError
from unidist_pipeline.schedules.builder import complete
from unidist_pipeline.schedules.model import Action, ActionKind, PipelineSize, Schedule, round_robin


def zb_h1(size: PipelineSize) -> Schedule:
    """1F1B in which rank r is r weight gradients late, so that every rank holds p micro-batches (ZB-H1, also ZB1P)."""
    return _one_stage("zb-h1", size, [(size.num_ranks - 1 - rank, rank) for rank in range(size.num_ranks)])


def zb_h2(size: PipelineSize) -> Schedule:
    """Rank r is 2(p-1-r) forwards ahead and 2r weight gradients late: each holds 2p-1 micro-batches (ZB-H2)."""
    return _one_stage("zb-h2", size, [(2 * (size.num_ranks - 1 - rank), 2 * rank) for rank in range(size.num_ranks)])


def _one_stage(name: str, size: PipelineSize, offsets: list[tuple[int, int]]) -> Schedule:
    """Return forward, backward and weight gradient in turns.

    Args:
        name: of the schedule.
        size: for what.
        offsets: for each rank, how many forwards come before the first turn, and how many turns the weight gradients
            wait.
    """
    if size.stages_per_rank != 1:
        raise ConfigurationError(
            f"{name} has one stage on each rank, not {size.stages_per_rank}; zbv and v-half have two."
        )
    compute = []
    for rank, (num_ahead, num_late) in enumerate(offsets):
        num_ahead = min(num_ahead, size.num_microbatches)
        actions = [Action(ActionKind.FORWARD, rank, each) for each in range(num_ahead)]
        for turn in range(size.num_microbatches + num_late):
            if turn + num_ahead < size.num_microbatches:
                actions.append(Action(ActionKind.FORWARD, rank, turn + num_ahead))
            if turn < size.num_microbatches:
                actions.append(Action(ActionKind.BACKWARD_INPUT, rank, turn))
            if num_late <= turn:
                actions.append(Action(ActionKind.BACKWARD_WEIGHT, rank, turn - num_late))
        compute.append(actions)
    return complete(name, size, round_robin(size), compute)
