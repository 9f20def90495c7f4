"""How long the phases of a change of the world took."""

from __future__ import annotations

import pytest

from unidist.control.messages import StepTimeReport
from unidist_status.recovery import RecoveryWatch


def test_each_phase_ends_when_the_last_rank_has_ended_it() -> None:
    watch = RecoveryWatch()
    watch.lost("rank 1 was lost", 100.0, 99.4)
    watch.changes("generation 0 has ended", 100.0)  # of the same loss
    watch.formed(1, [0, 2], 100.2)
    assert watch.last is not None
    assert not watch.last.is_complete
    assert not watch.reported(0, StepTimeReport(generation=1, restore_sec=0.3))  # its first step is under way
    assert not watch.reported(0, StepTimeReport(generation=1, restore_sec=0.3, first_step_sec=0.1))
    assert not watch.reported(2, StepTimeReport(generation=0, restore_sec=9.0, first_step_sec=9.0))  # an old one
    assert watch.reported(2, StepTimeReport(generation=1, restore_sec=0.2, first_step_sec=0.5))
    assert not watch.reported(2, StepTimeReport(generation=1, restore_sec=0.2, first_step_sec=0.5))  # said already
    assert watch.last.as_fields() == {
        "cause": "rank 1 was lost",
        "generation": 1,
        "is_complete": True,
        "detect_sec": pytest.approx(0.6),
        "reform_sec": pytest.approx(0.2),
        "restore_sec": 0.3,
        "first_step_sec": 0.5,
    }
    assert watch.num == 1


def test_a_second_loss_before_the_ranks_have_met_is_of_the_same_recovery() -> None:
    watch = RecoveryWatch()
    watch.lost("rank 1 was lost", 100.0, None)
    watch.lost("rank 0 was lost", 101.0, 100.9)
    watch.formed(2, [2], 102.0)
    assert watch.last is not None
    assert (watch.last.cause, watch.last.reform_sec, watch.num) == ("rank 1 was lost", 2.0, 1)
    watch.lost("rank 0 was lost", 103.0, 102.5)  # and one after that is not
    assert (watch.last.cause, watch.num) == ("rank 0 was lost", 2)


def test_the_first_generation_is_no_recovery() -> None:
    watch = RecoveryWatch()
    watch.formed(0, [0, 1], 5.0)
    assert not watch.reported(0, StepTimeReport(generation=0, first_step_sec=1.0))
    assert watch.last is None


def test_peers_that_notice_first_do_not_hide_when_the_rank_was_heard_of_last() -> None:
    watch = RecoveryWatch()
    watch.changes("rank 0 could not go on", 10.0)
    watch.lost("rank 1 was lost", 10.01, heard=9.6)
    assert watch.last is not None
    assert (watch.last.cause, watch.last.began) == ("rank 1 was lost", 10.0)
    assert watch.last.detect_sec == pytest.approx(0.4)
    assert watch.num == 1
