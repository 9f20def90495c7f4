"""The simulator against an independent longest path, by hand, and at sizes of large machines."""

from __future__ import annotations

import random
import time

import pytest

from tests.plugins.unidist_pipeline.sizes import all_schedules
from unidist.errors import ConfigurationError
from unidist_pipeline.schedules.builder import complete, with_gathers
from unidist_pipeline.schedules.classic import gpipe, interleaved, one_forward_one_backward
from unidist_pipeline.schedules.execution_model import MessageMode
from unidist_pipeline.schedules.model import COMPUTE, Action, ActionKind, PipelineSize, Schedule, ScheduleError
from unidist_pipeline.schedules.validation import validate
from unidist_pipeline.simulation.costs import Costs
from unidist_pipeline.simulation.simulator import simulate


def longest_path(schedule: Schedule, costs: Costs) -> float:
    """Return when the last computing action ends: the longest path over ranks' orders and data, found by relaxation."""
    stage_costs = costs.for_stages(schedule.num_stages)
    where: dict[tuple[str, int, int | None], Action] = {}
    before: dict[Action, list[tuple[Action, float]]] = {}
    for actions in schedule.compute():
        for previous, action in zip([None, *actions], actions, strict=False):
            before[action] = [(previous, 0.0)] if previous is not None else []
            where[action.kind.value, action.stage, action.microbatch] = action
    for action in before:
        kind, stage, microbatch = action.kind.value, action.stage, action.microbatch
        sources = {"F": [("F", -1)], "B": [("F", 0), ("B", 1)], "I": [("F", 0), ("I", 1)], "W": [("I", 0)]}[kind]
        for source_kind, step in sources:
            for each in {source_kind, *("BI" if source_kind in "BI" else "")}:
                source = where.get((each, stage + step, microbatch))
                if source is not None:
                    remote = schedule.placement[stage + step] != schedule.placement[stage]
                    before[action].append((source, costs.message if remote else 0.0))
    ends = dict.fromkeys(before, 0.0)
    changed = True
    while changed:
        changed = False
        for action, sources_ in before.items():
            start = max((ends[source] + delay for source, delay in sources_), default=0.0)
            end = start + stage_costs.duration(action)
            changed |= end > ends[action]
            ends[action] = max(end, ends[action])
    return max(ends.values())


def test_the_makespan_is_the_longest_path_for_random_costs() -> None:
    rng = random.Random(5)
    for schedule in all_schedules(ranks=(1, 3), microbatches=(1, 4, 5)):
        backward = [rng.uniform(1, 3) for _ in range(schedule.num_stages)]
        costs = Costs(
            forward=[rng.uniform(0.5, 2) for _ in backward],
            backward=backward,
            backward_weight=[each * rng.random() for each in backward],
            message=rng.choice([0.0, 0.3, 4.0]),
        )
        assert simulate(schedule, costs).makespan == pytest.approx(longest_path(schedule, costs), abs=1e-9)


def test_the_slowest_stage_decides() -> None:
    """In the steady state each micro-batch costs what its slowest stage takes."""
    costs = Costs(forward=(1, 1, 3, 1), backward=(2, 2, 6, 2))
    times = [simulate(one_forward_one_backward(PipelineSize(4, m)), costs).makespan for m in (16, 17)]
    assert times[1] - times[0] == 9


@pytest.mark.parametrize("latency", [0.25, 1.0])
def test_each_message_on_the_way_of_the_first_microbatch_costs_its_time(latency: float) -> None:
    p, m = 4, 8
    plain, slow = (simulate(gpipe(PipelineSize(p, m)), Costs(message=each)).makespan for each in (0.0, latency))
    assert slow - plain == pytest.approx(2 * (p - 1) * latency)


def test_whoever_waits_more_is_never_quicker() -> None:
    costs = Costs(forward=1, backward=1.5, message=0.5)
    slower = 0
    for schedule in all_schedules(ranks=(4,), microbatches=(3, 8)):
        free, buffered, both = (simulate(schedule, costs, messages=each).makespan for each in MessageMode)
        assert free <= buffered + 1e-9
        assert buffered <= both + 1e-9
        slower += free < both
    assert slower > 10


def test_exchanges_go_on_beside_computing_and_count_at_the_end() -> None:
    schedule = one_forward_one_backward(PipelineSize(2, 4))
    assert simulate(schedule, Costs(reduce=0.5)).makespan == simulate(schedule).makespan + 0.5
    only_last = Costs(reduce=(0, 2))  # rank 1 is done 2 earlier
    assert simulate(schedule, only_last).makespan == simulate(schedule).makespan


def test_parameters_are_gathered_while_later_stages_wait() -> None:
    schedule = with_gathers(one_forward_one_backward(PipelineSize(4, 4)))
    plain = simulate(schedule).makespan
    assert simulate(schedule, Costs(gather=(0, 1, 2, 3))).makespan == plain
    assert simulate(schedule, Costs(gather=(0, 1, 2, 3.5))).makespan == plain + 0.5


def test_times_and_memory_by_hand() -> None:
    F, I, W = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT  # noqa: E741, N806
    rank_0 = [Action(F, 0, 0), Action(F, 0, 1), Action(I, 0, 0), Action(W, 0, 0), Action(I, 0, 1), Action(W, 0, 1)]
    rank_1 = [Action(F, 1, 0), Action(I, 1, 0), Action(F, 1, 1), Action(I, 1, 1), Action(W, 1, 0), Action(W, 1, 1)]
    schedule = complete("by hand", PipelineSize(2, 2), (0, 1), [rank_0, rank_1])
    simulation = simulate(schedule, Costs(1, 5, 2, 0.5, activation=(10, 1), kept_for_weight=0.5))
    spans = [[(str(action), start, end) for action, start, end in simulation.computing(rank)] for rank in range(2)]
    assert spans[0] == [
        ("0F0", 0, 1), ("0F1", 1, 2), ("0I0", 6, 9), ("0W0", 9, 11), ("0I1", 11, 14), ("0W1", 14, 16)
    ]  # fmt: skip
    assert spans[1] == [
        ("1F0", 1.5, 2.5), ("1I0", 2.5, 5.5), ("1F1", 5.5, 6.5), ("1I1", 6.5, 9.5), ("1W0", 9.5, 11.5),
        ("1W1", 11.5, 13.5),
    ]  # fmt: skip
    assert simulation.makespan == 16
    assert simulation.busy == (12, 12)
    assert simulation.spans == (16, 12)
    assert simulation.bubble_fraction == 0.25
    assert simulation.longest_bubble == 4
    assert simulation.peak_activations == (20, 1.5)


def test_a_deadlock_is_an_error_and_no_endless_loop() -> None:
    schedule = one_forward_one_backward(PipelineSize(2, 2))
    lists = [list(actions) for actions in schedule.ranks]
    lists[1].remove(next(action for action in lists[1] if action.kind is ActionKind.SEND_GRADIENT))
    spoilt = Schedule("spoilt", 2, schedule.placement, tuple(map(tuple, lists)))
    with pytest.raises(ScheduleError, match="rank 0 waits for ever at 0B0"):
        simulate(spoilt)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": -1}, "forward=-1: it must be 0 or more"),
        ({"message": float("inf")}, "message=inf"),
        ({"backward": (1, float("nan"))}, "backward=nan"),
        ({"forward": (1, 2, 3)}, "forward has 3 numbers, but the pipeline 2 stages"),
        ({"backward": (2, 1), "backward_weight": 1.5}, "stage 1: backward_weight=1.5 is a part of backward=1"),
        ({"kept_for_weight": 1.5}, "kept_for_weight=1.5 is a part of 1"),
    ],
)
def test_costs_that_make_no_sense_are_refused(costs: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        simulate(one_forward_one_backward(PipelineSize(2, 2)), Costs(**costs))


def test_actions_that_take_no_time_have_no_bubble() -> None:
    simulation = simulate(one_forward_one_backward(PipelineSize(2, 2)), Costs(forward=0, backward=0))
    assert (simulation.makespan, simulation.bubble_fraction) == (0, 0)


@pytest.mark.soak  # it measures time
def test_it_takes_time_in_proportion_to_the_actions() -> None:
    """Ten times as many ranks take less than three times as long per action, from the lists to the figures."""

    def seconds_per_action(num_ranks: int, num_microbatches: int) -> float:
        best = float("inf")
        for _ in range(2):
            begin = time.process_time()
            schedule = interleaved(PipelineSize(num_ranks, num_microbatches, 2))
            validate(schedule)
            simulation = simulate(schedule)
            assert simulation.makespan > 0
            used = time.process_time() - begin
            best = min(best, used / sum(len(actions) for actions in schedule.ranks))
        return best

    assert seconds_per_action(300, 6) < 3 * seconds_per_action(30, 6)


def test_only_computing_is_counted_as_busy() -> None:
    for schedule in all_schedules(ranks=(2,), microbatches=(3,)):
        simulation = simulate(schedule, Costs(message=1, reduce=1))
        for rank, actions in enumerate(schedule.ranks):
            assert len(list(simulation.computing(rank))) == sum(action.kind in COMPUTE for action in actions)
        assert simulate(schedule).busy == simulation.busy
