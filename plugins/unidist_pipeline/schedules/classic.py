"""GPipe, 1F1B and interleaved 1F1B: backwards are computed in one piece.

With m micro-batches on p ranks, v stages on each, and forwards and backwards that take equally long on all stages,
the part of the time in which a rank is idle is (p-1)/(vm+p-1).
"""

from __future__ import annotations

from unidist.errors import ConfigurationError
from unidist_pipeline.schedules.builder import complete
from unidist_pipeline.schedules.model import Action, ActionKind, PipelineSize, Schedule, round_robin


def gpipe(size: PipelineSize) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965).

    With several stages on each rank it is breadth-first: a stage computes all micro-batches before the next one of the
    same rank does (Lamy-Poirier 2022, arXiv:2211.05953).
    """
    placement = round_robin(size)
    microbatches = range(size.num_microbatches)
    compute = []
    for rank in range(size.num_ranks):
        stages = range(rank, size.num_stages, size.num_ranks)
        forwards = [Action(ActionKind.FORWARD, stage, each) for stage in stages for each in microbatches]
        backwards = [Action(ActionKind.BACKWARD, stage, each) for stage in reversed(stages) for each in microbatches]
        compute.append(forwards + backwards)
    return complete("gpipe", size, placement, compute)


def one_forward_one_backward(size: PipelineSize) -> Schedule:
    """Forward and backward in turns, after enough forwards to fill the stages behind.

    The PipeDream-Flush of Narayanan et al. 2021 (arXiv:2006.09503). Rank r holds at most `min(p - r, m)` micro-batches.

    Raises:
        ConfigurationError: more than one stage on each rank.
    """
    if size.stages_per_rank != 1:
        raise ConfigurationError(
            f"1f1b has one stage on each rank, not {size.stages_per_rank}; use the schedule interleaved."
        )
    compute = []
    for rank in range(size.num_ranks):
        num_ahead = min(size.num_ranks - 1 - rank, size.num_microbatches)
        forwards = [Action(ActionKind.FORWARD, rank, each) for each in range(size.num_microbatches)]
        backwards = [Action(ActionKind.BACKWARD, rank, each) for each in range(size.num_microbatches)]
        compute.append(in_turns(forwards, backwards, num_ahead))
    return complete("1f1b", size, round_robin(size), compute)


def interleaved(size: PipelineSize) -> Schedule:
    """1F1B with several stages on each rank (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

    Micro-batches go through in rounds of at least p (if there are as many): a round passes all stages of a rank before
    the next one begins. The paper has rounds of exactly p; here m need not be a multiple, rounds differ by at most one
    micro-batch. The formula of the module's text holds if p divides m.

    Raises:
        ConfigurationError: only one stage on each rank.
    """
    if size.stages_per_rank < 2:
        raise ConfigurationError("interleaved has 2 or more stages on each rank; with 1, use the schedule 1f1b.")
    rounds = rounds_of(size.num_microbatches, size.num_ranks)
    ahead_on_last = (size.stages_per_rank - 1) * len(rounds[0])
    compute = []
    for rank in range(size.num_ranks):
        stages = range(rank, size.num_stages, size.num_ranks)
        forwards = [Action(ActionKind.FORWARD, stage, each) for lap in rounds for stage in stages for each in lap]
        backwards = [
            Action(ActionKind.BACKWARD, stage, each) for lap in rounds for stage in reversed(stages) for each in lap
        ]
        num_ahead = min(ahead_on_last + 2 * (size.num_ranks - 1 - rank), len(forwards))
        compute.append(in_turns(forwards, backwards, num_ahead))
    return complete("interleaved", size, round_robin(size), compute)


def in_turns(forwards: list[Action], backwards: list[Action], num_ahead: int) -> list[Action]:
    """Return `num_ahead` forwards, then forward and backward in turns, then the other backwards."""
    turns = [action for pair in zip(forwards[num_ahead:], backwards, strict=False) for action in pair]
    return forwards[:num_ahead] + turns + backwards[len(forwards) - num_ahead :]


def rounds_of(num_microbatches: int, num_ranks: int) -> list[range]:
    """Return all micro-batches in rounds of `num_ranks` or a few more, as equal as possible, longer ones first."""
    num_rounds = max(1, num_microbatches // num_ranks)
    short, num_longer = divmod(num_microbatches, num_rounds)
    rounds, start = [], 0
    for index in range(num_rounds):
        stop = start + short + (index < num_longer)
        rounds.append(range(start, stop))
        start = stop
    return rounds
