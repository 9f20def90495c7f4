"""How fast a worker gets on, from its beats."""

from __future__ import annotations

import pytest

from unidist.control.messages import StepTimeReport
from unidist_status.step_times import StepTimeWindow


def report(
    commits: int, *, own: float = 0.0, waited: float = 0.0, generation: int = 0, updates: int = 0
) -> StepTimeReport:
    return StepTimeReport(
        generation=generation, commits=commits, updates=updates, timed=commits, own_sec=own, waited_sec=waited
    )


def test_rates_and_times_are_those_of_the_last_beats() -> None:
    window = StepTimeWindow()
    assert window.rates(0.0) == (0.0, 0.0)
    assert window.times() is None
    for second in range(100):
        steps = 4 * second
        window.add(report(steps, own=0.2 * steps, waited=0.05 * steps, updates=2 * steps), float(second))
    assert window.rates(99.0) == pytest.approx((4.0, 8.0))
    times = window.times()
    assert times is not None
    assert times.own_sec == pytest.approx(0.2)
    assert times.waited_sec == pytest.approx(0.05)
    assert times.commits < 60  # of the last seconds, not of the whole job


def test_steps_that_are_slower_than_beats_are_measured_too() -> None:
    window = StepTimeWindow()
    for second in range(300):  # a step in half a minute, a beat every second
        steps = second // 30
        window.add(report(steps, own=30.0 * steps), float(second))
    assert window.rates(300.0)[0] == pytest.approx(1 / 30)
    times = window.times()
    assert times is not None
    assert times.own_sec == pytest.approx(30.0)


def test_the_rate_of_one_that_stands_still_falls() -> None:
    window = StepTimeWindow()
    for second in range(5):
        window.add(report(second), float(second))
    assert window.rates(5.0)[0] == pytest.approx(1.0)
    assert window.rates(40.0)[0] == pytest.approx(0.1)


def test_a_new_generation_begins_a_new_window() -> None:
    window = StepTimeWindow()
    window.add(report(10), 0.0)
    window.add(report(20), 1.0)
    window.add(report(21, generation=1), 50.0)
    assert window.rates(50.0) == (0.0, 0.0)
