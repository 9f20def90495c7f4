"""What a process of an elastic job tells of its steps."""

from __future__ import annotations

import pytest

from unidist.control.elastic.step_times import StepTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_own_time_is_that_of_steps_without_the_waiting() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    timer.begin(0, progress=0, waited_sec=5.0)
    waited = 5.0
    for own, wait in ((9.0, 1.0), (1.0, 2.0), (1.5, 0.5)):
        clock.now += own + wait
        waited += wait
        timer.commit(waited_sec=waited)
    report = timer.report
    assert (report.commits, report.timed) == (3, 2)
    assert report.first_step_sec == pytest.approx(10.0)  # compiling, warming up: it says nothing about the others
    assert report.own_sec == pytest.approx(2.5)
    assert report.waited_sec == pytest.approx(2.5)
    assert report.restore_sec is None


def test_each_generation_has_a_first_step_of_its_own_and_sums_go_on() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    timer.begin(0, progress=0, waited_sec=0.0)
    clock.now += 3
    assert timer.commit(waited_sec=0.0) == pytest.approx(3.0)
    clock.now += 1
    assert timer.commit(waited_sec=0.25) is None
    clock.now += 50  # a rank was lost, the world formed again
    timer.begin(2, progress=40, waited_sec=0.0, restore_sec=0.5)  # the new runtime counts from zero
    assert (timer.report.generation, timer.report.restore_sec, timer.report.first_step_sec) == (2, 0.5, None)
    clock.now += 2
    assert timer.commit(waited_sec=0.75) == pytest.approx(2.0)
    clock.now += 1
    timer.commit(waited_sec=1.0)
    assert (timer.report.commits, timer.report.timed, timer.report.progress) == (4, 2, 42)
    assert timer.report.own_sec == pytest.approx(0.75 + 0.75)


def test_waiting_of_several_threads_never_exceeds_the_step() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    timer.begin(0, progress=0, waited_sec=0.0)
    timer.commit(waited_sec=0.0)
    clock.now += 1
    timer.commit(waited_sec=7.0)
    assert (timer.report.own_sec, timer.report.waited_sec) == (0.0, 1.0)


def test_updates_are_told_beside_commits() -> None:
    timer = StepTimer()
    timer.update()
    timer.update()
    assert timer.report.updates == 2
    assert timer.report.commits == 0
