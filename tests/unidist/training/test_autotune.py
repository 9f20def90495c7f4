"""The search for the best bucket size: what it tries, when it stops, what it writes down."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidist.training.autotune import SMALLEST_BYTES, Choice, ClimbingSearch, Tuner, bucket_choices

MIB = 1 << 20


def search(costs: list[float], start: int) -> tuple[int, list[int]]:
    """Return where the search ends and what it tried on the way."""
    climbing = ClimbingSearch(range(len(costs)), start)
    tried = []
    while not climbing.finished:
        tried.append(climbing.current)
        climbing.tell(costs[climbing.current])
    return climbing.current, tried


@pytest.mark.parametrize(
    ("costs", "start", "best", "tried"),
    [
        ([5, 4, 3, 2, 1], 2, 4, [2, 3, 4]),
        ([1, 2, 3, 4, 5], 2, 0, [2, 3, 1, 0]),
        ([5, 2, 1, 2, 5], 2, 2, [2, 3, 1]),
        ([5, 4, 3, 2, 3], 1, 3, [1, 2, 3, 4]),
        ([7], 0, 0, [0]),
        ([3, 2], 1, 1, [1, 0]),
    ],
)
def test_it_climbs_up_then_down_to_the_best(costs: list[float], start: int, best: int, tried: list[int]) -> None:
    assert search(costs, start) == (best, tried)


def test_an_improvement_as_small_as_noise_is_none() -> None:
    assert search([100.0, 100.0, 99.0], 1) == (1, [1, 2, 0])


@given(st.integers(1, 12), st.integers(0, 11), st.integers(0, 11))
def test_the_valley_is_found_from_everywhere(count: int, start: int, valley: int) -> None:
    start, valley = start % count, valley % count
    best, tried = search([2.0 ** abs(index - valley) for index in range(count)], start)
    assert best == valley
    assert len(tried) == len(set(tried))


def test_choices_are_those_that_make_a_difference() -> None:
    assert bucket_choices(3 * MIB, MIB) == [MIB // 4, MIB // 2, MIB, 2 * MIB, 4 * MIB]
    assert bucket_choices(3 * MIB, 64 * MIB) == [MIB // 4, MIB // 2, MIB, 2 * MIB, 4 * MIB]
    assert bucket_choices(100, 64 * MIB) == [SMALLEST_BYTES]
    assert bucket_choices(100, 64) == [64, 128]


def drive(tuner: Tuner, now: list[float], seconds: Callable[[int], float], start: int) -> list[int]:
    """Do updates that take `seconds(bucket_bytes)` until the tuner is content; returns the sizes in use."""
    used = [start]
    for _ in range(1000):
        now[0] += seconds(used[-1])
        if tuner.due():
            choice = tuner.next_choice()
            tuner.restart()
            now[0] += 50.0  # the change itself is not measured
            used.append(choice.bucket_bytes)
            if choice.final:
                return used
    raise AssertionError("no end")


def test_the_fastest_size_is_kept_and_the_log_tells_why(tmp_path: Path) -> None:
    now = [0.0]
    log = tmp_path / "new" / "tune.csv"
    tuner = Tuner(8 * MIB, Choice(2 * MIB, None), log=log, clock=lambda: now[0])
    used = drive(tuner, now, lambda size: {4 * MIB: 0.5, 8 * MIB: 0.8}.get(size, 1.0), 2 * MIB)
    assert used == [2 * MIB, 4 * MIB, 8 * MIB, 4 * MIB]
    header, *rows = csv.reader(log.read_text().splitlines())
    assert header == ["gradient_bytes", "update", "bucket_bytes", "cycle_time_ms", "median_update_ms", "decision"]
    assert [(row[0], int(row[2]), float(row[4])) for row in rows] == [
        (str(8 * MIB), 2 * MIB, 1000.0),
        (str(8 * MIB), 4 * MIB, 500.0),
        (str(8 * MIB), 8 * MIB, 800.0),
    ]
    assert rows[-1][5] == f"stay with buckets of {4 * MIB} bytes"


def test_a_pause_in_the_middle_does_not_mislead() -> None:
    now = [0.0]
    tuner = Tuner(2 * MIB, Choice(MIB, None), clock=lambda: now[0])
    updates = 0

    def seconds(size: int) -> float:
        nonlocal updates
        updates += 1
        return 60.0 if updates % 6 == 0 else 1.0 + (size < MIB)  # an evaluation every six updates

    assert drive(tuner, now, seconds, MIB)[-1] == MIB


def test_every_rank_is_due_after_the_same_number_of_updates() -> None:
    clocks = [[0.0], [0.0]]
    tuners = [Tuner(2 * MIB, Choice(MIB, None), clock=lambda own=own: own[0]) for own in clocks]  # type: ignore[misc]  # a default binds it
    found = []
    for update in range(40):
        for own, speed in zip(clocks, (1.0, 3.0), strict=True):
            own[0] += speed
        due = [tuner.due() for tuner in tuners]
        assert due[0] == due[1]
        if due[0]:
            found.append(update)
            for tuner in tuners:
                tuner.restart()
    assert len(found) == 2


@pytest.mark.parametrize(("pauses", "wanted"), [(True, 0.5), (False, 1.0)])
def test_the_cycle_time_is_chosen_after_the_buckets_where_this_rank_pauses(pauses: bool, wanted: float) -> None:
    now, num_pauses = [0.0], [0]
    tuner = Tuner(2 * MIB, Choice(MIB, 1.0), num_pauses=lambda: num_pauses[0], clock=lambda: now[0])
    choice = Choice(MIB, 1.0)
    tried = []
    while not choice.final:
        assert choice.cycle_time_ms is not None
        now[0] += 1.0 + 0.1 * abs(choice.cycle_time_ms - 0.5) + (choice.bucket_bytes != 2 * MIB)
        num_pauses[0] += pauses
        if tuner.due():
            choice = tuner.next_choice()
            tuner.restart()
            tried.append((choice.bucket_bytes, choice.cycle_time_ms))
    assert (choice.bucket_bytes, choice.cycle_time_ms) == (2 * MIB, wanted)
    assert len(set(tried[:-1])) == len(tried[:-1]), "nothing but the last is tried twice"
