"""DualPipeV: idle time and memory of DeepSeek's table, with PP = 2p stages on p ranks."""

from __future__ import annotations

import pytest

from unidist.errors import ConfigurationError
from unidist_pipeline.schedules.dualpipe import dualpipev
from unidist_pipeline.schedules.facts import made_by, needed_by
from unidist_pipeline.schedules.model import Action, ActionKind, PipelineSize, Schedule
from unidist_pipeline.schedules.playback import PlaybackStep, play
from unidist_pipeline.schedules.v_shape import zbv
from unidist_pipeline.schedules.validation import validate
from unidist_pipeline.simulation.costs import Costs
from unidist_pipeline.simulation.simulator import simulate


def longest_idle_in_whole_pairs(schedule: Schedule, forward: float, weight: float) -> float:
    """Return the longest idle time of a rank if a pair begins with both inputs and gives both results at its end.

    That is what the table calls F&B; here it takes as long as its two parts. A backward for the input takes `forward`.
    """
    times = {
        ActionKind.FORWARD: forward,
        ActionKind.BACKWARD: forward + weight,
        ActionKind.BACKWARD_INPUT: forward,
        ActionKind.BACKWARD_WEIGHT: weight,
    }

    def needs(action: Action) -> tuple[tuple[str, int, int], ...]:
        return needed_by(action, schedule.placement, by_message=False)

    ranks: list[list[PlaybackStep]] = []
    for rank, actions in enumerate(schedule.compute()):
        steps: list[PlaybackStep] = []
        left = list(actions)
        apart = rank == schedule.num_ranks - 1  # the source leaves the first pair of the last rank apart
        while left:
            action = left.pop(0)
            paired = (
                bool(left)
                and (action.kind, left[0].kind) == (ActionKind.FORWARD, ActionKind.BACKWARD)
                and action.stage != left[0].stage
            )
            if paired and not apart:
                other = left.pop(0)
                together = times[action.kind] + times[other.kind]
                steps.append(PlaybackStep((*needs(action), *needs(other)), None, together))
                steps += [PlaybackStep((), made_by(action)), PlaybackStep((), made_by(other))]
            else:
                apart = apart and not paired
                steps.append(PlaybackStep(needs(action), made_by(action), times[action.kind]))
        ranks.append(steps)
    played = play(ranks)
    assert not played.stuck
    return max(
        ends[-1] - starts[0] - sum(step.duration for step in steps)
        for starts, ends, steps in zip(played.starts, played.ends, ranks, strict=True)
    )


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7, 8])
def test_the_idle_time_is_the_published_one_if_pairs_are_one_action(p: int) -> None:
    """(PP/2-1)(F&B+B-3W), where F = W, B = 2W and F&B = F+B."""
    for m in (2 * p, 3 * p):
        schedule = dualpipev(PipelineSize(p, m, 2))
        assert longest_idle_in_whole_pairs(schedule, 1, 1) == (p - 1) * (3 + 2 - 3 * 1)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7, 8])
def test_it_is_half_of_that_if_a_pair_sends_its_forward_first(p: int) -> None:
    for m in (2 * p, 2 * p + 1, 3 * p):
        simulation = simulate(dualpipev(PipelineSize(p, m, 2)))
        assert simulation.longest_bubble == simulation.makespan - 6 * m == p - 1
        assert set(simulation.peak_activations) == {2 * p + 1}, "PP+1, as published"


def test_most_backwards_are_in_one_piece() -> None:
    """Cutting a backward in two costs time on real machines, which zbv does with every one."""
    p, m = 8, 32
    both = Costs(backward=2.2, backward_weight=1.1)  # a backward in two parts
    for actions in dualpipev(PipelineSize(p, m, 2)).compute():
        assert sum(action.kind is ActionKind.BACKWARD for action in actions) >= 2 * m - 2 * p
    assert simulate(dualpipev(PipelineSize(p, m, 2))).makespan < simulate(zbv(PipelineSize(p, m, 2)), both).makespan


@pytest.mark.parametrize("p", [1, 2, 5])
def test_with_few_micro_batches_it_is_the_schedule_for_2p_without_the_others(p: int) -> None:
    whole = dualpipev(PipelineSize(p, 2 * p, 2)).compute()
    for m in range(1, 2 * p):
        schedule = dualpipev(PipelineSize(p, m, 2))
        validate(schedule)
        assert schedule.compute() == [[a for a in actions if (a.microbatch or 0) < m] for actions in whole]


@pytest.mark.parametrize("stages", [1, 3])
def test_another_number_of_stages_is_refused(stages: int) -> None:
    with pytest.raises(ConfigurationError, match=f"dualpipev has two stages on each rank, not {stages}"):
        dualpipev(PipelineSize(2, 4, stages))
