"""How long a loop stood still."""

from __future__ import annotations

from unidist.control.standstill import Standstill


def test_ordinary_turns_are_no_standstill_and_a_long_one_counts_whole() -> None:
    standstill = Standstill()
    assert [standstill.turn(now) for now in (50.0, 50.1, 51.0, 63.0, 63.1)] == [0.0, 0.0, 0.0, 12.0, 0.0]
