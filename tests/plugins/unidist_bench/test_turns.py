from __future__ import annotations

import time

import pytest

from unidist_bench import BenchmarkRanks, Durations, side_by_side, take_turns


def alone(barriers: list[str] | None = None) -> BenchmarkRanks:
    return BenchmarkRanks(lambda: None if barriers is None else barriers.append("barrier"), lambda own: [own])


def test_variants_take_turns_in_an_order_that_rotates_after_a_barrier_each() -> None:
    ran: list[str] = []
    variants = {name: (lambda name=name: ran.append(name)) for name in "abc"}
    found = take_turns(variants, alone(ran), repetitions=3, warmup=1, inner=2)
    turns = [ran[at : at + 3] for at in range(0, len(ran), 3)]
    assert all(turn[0] == "barrier" and turn[1] == turn[2] for turn in turns)
    assert "".join(turn[1] for turn in turns) == "cab" + "abc" + "bca" + "cab"
    assert {name: len(durations) for name, durations in found.items()} == {"a": 3, "b": 3, "c": 3}


def test_the_duration_is_that_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 10.75])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    found = take_turns({"nap": lambda: None}, alone(), repetitions=1, warmup=0, inner=3)
    assert found == {"nap": [0.25]}


def test_of_several_ranks_the_slowest_counts_in_each_repetition() -> None:
    def ranks(own: Durations) -> list[Durations]:
        return [[[1.0, 5.0], [2.0, 6.0], [9.0, 0.5]], [[3.0, 4.0], [1.0, 7.0], [0.1, 0.2]]]

    meeting = BenchmarkRanks(lambda: None, ranks)
    nothing = {"a": lambda: None, "b": lambda: None}
    assert take_turns(nothing, meeting, repetitions=3) == {"a": [3.0, 2.0, 9.0], "b": [5.0, 7.0, 0.5]}
    assert side_by_side(nothing, meeting, repetitions=3) == pytest.approx({"a": 3.0, "b": 5.0})
