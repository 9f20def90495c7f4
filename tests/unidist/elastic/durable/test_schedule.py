"""How often durable checkpoints are made follows from what they cost."""

from __future__ import annotations

from datetime import timedelta

import pytest

from unidist.elastic.durable.schedule import AIM, MOST, PAUSE_AFTER_FAILURE_SEC, SHORTEST_SEC, CheckpointSchedule


def train(
    schedule: CheckpointSchedule, seconds: float, *, step: float, copy: float, write: float, slow: float
) -> float:
    """Train so long; return the share of the time that checkpoints have cost.

    Args:
        schedule: says when one is made.
        seconds: in all.
        step: of a step.
        copy: in which training stands still.
        write: in which steps take `slow` times as long.
        slow: see above.
    """
    now = cost = 0.0
    written_at: float | None = None
    schedule.begin(now)
    while now < seconds:
        taken = step * (1.0 if written_at is None else slow)
        cost += taken - step
        now += taken
        schedule.step(now)
        if written_at is not None and now >= written_at:
            schedule.written()
            written_at = None
        if written_at is None and schedule.is_due(now):
            began, now = now, now + copy
            cost += copy
            schedule.saved(began, now)
            written_at = now + write
    return cost / now


@pytest.mark.parametrize(
    ("step", "copy", "write", "slow"),
    [(0.1, 0.02, 1.0, 1.0), (0.1, 0.5, 4.0, 1.5), (0.5, 2.0, 30.0, 1.3), (3.0, 0.4, 1.0, 1.2), (0.01, 0.0, 0.5, 1.1)],
)
def test_checkpoints_take_less_than_the_limit_and_are_not_rarer_than_that_needs(
    step: float, copy: float, write: float, slow: float
) -> None:
    schedule = CheckpointSchedule()
    share = train(schedule, 8000 * step, step=step, copy=copy, write=write, slow=slow)
    assert share < MOST
    assert share > 0.6 * AIM or schedule.interval_sec == SHORTEST_SEC


def test_the_first_one_comes_soon_though_nobody_knows_its_cost_and_the_next_when_that_allows() -> None:
    schedule = CheckpointSchedule()
    schedule.begin(100.0)
    assert not schedule.is_due(100.0 + SHORTEST_SEC - 0.1)
    assert schedule.is_due(100.0 + SHORTEST_SEC)
    schedule.saved(105.0, 108.0)
    assert schedule.written() == (3.0, 0.0)
    assert schedule.interval_sec == pytest.approx(3.0 / AIM)
    assert not schedule.is_due(105.0 + 99.0)
    assert schedule.is_due(105.0 + 101.0)


def test_a_long_step_that_is_no_fault_of_the_checkpoint_counts_as_one_twice_as_long() -> None:
    schedule = CheckpointSchedule()
    schedule.begin(0.0)
    for number in range(1, 11):
        schedule.step(float(number))
    schedule.saved(10.0, 10.5)
    schedule.step(70.5)  # an evaluation
    assert schedule.written() == pytest.approx((0.5, 1.0))


def test_an_interval_that_was_given_is_kept_whatever_it_costs() -> None:
    schedule = CheckpointSchedule(timedelta(seconds=2))
    schedule.begin(0.0)
    schedule.saved(2.0, 3.5)
    schedule.written()
    assert not schedule.is_due(3.9)
    assert schedule.is_due(4.0)


def test_the_time_of_a_change_of_ranks_is_no_step_and_does_not_put_the_checkpoint_off() -> None:
    schedule = CheckpointSchedule()
    schedule.begin(0.0)
    schedule.step(1.0)
    schedule.begin(4.5)
    schedule.step(5.5)
    assert schedule.is_due(5.5)
    schedule.saved(5.5, 5.5)
    schedule.step(7.5)
    assert schedule.written() == pytest.approx((0.0, 1.0))  # two seconds instead of one


def test_after_a_failure_there_is_a_pause() -> None:
    schedule = CheckpointSchedule(timedelta(seconds=1))
    schedule.begin(0.0)
    schedule.saved(1.0, 1.0)
    schedule.failed(2.0)
    assert not schedule.is_due(1.0 + PAUSE_AFTER_FAILURE_SEC)
    assert schedule.is_due(2.0 + PAUSE_AFTER_FAILURE_SEC)
