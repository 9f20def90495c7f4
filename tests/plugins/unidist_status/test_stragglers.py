"""Which rank the others wait for."""

from __future__ import annotations

import pytest

from unidist_status.step_times import StepTimes
from unidist_status.stragglers import StragglerWatch


def times(*own: float | None, commits: int = 10) -> dict[int, StepTimes | None]:
    return {i: None if sec is None else StepTimes(commits, sec, 1.0 - sec) for i, sec in enumerate(own)}


def test_the_rank_that_works_longest_is_named_once_when_it_stays_so() -> None:
    watch = StragglerWatch()
    assert watch.update(times(0.1, 0.1, 0.3)) is None
    named = watch.update(times(0.1, 0.1, 0.3))
    assert named is not None
    assert (named.worker, named.others_sec, named.factor) == (2, 0.1, pytest.approx(3.0))
    assert watch.update(times(0.1, 0.1, 0.3)) is None
    assert watch.current is not None


def test_of_two_ranks_the_slow_one_is_named() -> None:
    watch = StragglerWatch()
    watch.update(times(0.2, 0.1))
    named = watch.update(times(0.2, 0.1))
    assert named is not None
    assert named.worker == 0


@pytest.mark.parametrize(
    "seen",
    [
        times(0.10, 0.11, 0.14),  # not by enough
        times(0.001, 0.001, 0.004),  # thousandths of a second
        times(0.1, 0.1, None),  # one of them is not known yet
        times(0.1, 0.1, 0.3, commits=2),  # too little is known of all
        times(0.1),
        times(),
    ],
)
def test_nobody_is_named_without_good_reason(seen: dict[int, StepTimes | None]) -> None:
    watch = StragglerWatch()
    assert [watch.update(seen) for _ in range(5)] == [None] * 5
    assert watch.current is None


def test_one_slow_look_is_not_enough_nor_are_two_ranks_by_turns() -> None:
    watch = StragglerWatch()
    for _ in range(3):
        assert watch.update(times(0.1, 0.1, 0.3)) is None
        assert watch.update(times(0.1, 0.3, 0.1)) is None
    assert watch.current is None


def test_it_is_named_until_it_is_as_fast_as_the_others_again() -> None:
    watch = StragglerWatch()
    for _ in range(2):
        watch.update(times(0.1, 0.1, 0.3))
    watch.update(times(0.1, 0.1, 0.14))
    assert watch.current is not None
    assert watch.current.own_sec == 0.14
    watch.update(times(0.1, 0.1, 0.11))
    assert watch.current is None


def test_another_set_of_ranks_begins_anew() -> None:
    watch = StragglerWatch()
    for _ in range(2):
        watch.update(times(0.1, 0.1, 0.3))
    watch.reset()
    assert watch.current is None
    assert watch.update(times(0.1, 0.1, 0.3)) is None
