"""Progress reports of ranks, and the curves made of them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from unidist_status.model import JobStatus, title_of
from unidist_status.progress import NUM_POINTS, History, ProgressReport, ProgressWindow


def told(time: float, steps: int, *, waited: float = 0.0, **values: Any) -> dict[str, Any]:
    fields = {"time": time, "steps": steps, "samples": 8 * steps, "waited_sec": waited, "memory_bytes": 1 << 20}
    return {**fields, "values": values}


def window(*reports: dict[str, Any]) -> ProgressWindow:
    made = ProgressWindow()
    for fields in reports:
        report = ProgressReport.read(fields)
        assert report is not None
        made.add(report, fields["time"] + 1000)
    return made


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"time": "soon"},
        {**told(1.0, 1), "steps": None},
        {**told(1.0, 1), "values": [1]},
        {**told(1.0, 1), "values": {"loss": "low"}},
        {**told(1.0, 1), "time": math.inf},
    ],
)
def test_a_report_that_makes_no_sense_is_none(wrong: dict[str, Any]) -> None:
    assert ProgressReport.read(wrong) is None


def test_rates_are_of_the_last_seconds() -> None:
    slow = [told(float(second), second, waited=0.25 * second) for second in range(20)]
    fast = [told(20.0 + second, 20 + 4 * second, waited=5.0 + 0.75 * second) for second in range(20)]
    rates = window(*slow, *fast).rates(1039.0)
    assert (rates.steps_per_sec, rates.samples_per_sec, rates.waiting) == (4.0, 32.0, 0.75)


def test_a_rank_that_is_silent_gets_slower_and_one_that_counts_anew_has_no_rates_at_first() -> None:
    made = window(told(0.0, 0), told(1.0, 10), told(2.0, 20))
    assert made.rates(1002.5).steps_per_sec == 10.0
    assert made.rates(1018.0).steps_per_sec == pytest.approx(20 / 18)
    again = ProgressReport.read(told(3.0, 1))
    assert again is not None
    made.add(again, 1003.0)
    assert not made.has_rates
    assert made.rates(1003.0).steps_per_sec == 0.0


def test_the_history_spans_the_whole_job_with_a_bounded_number_of_points() -> None:
    history = History()
    for second in range(5000):
        if history.is_due(second):
            history.add({"elapsed_sec": float(second)})
    times = [point["elapsed_sec"] for point in history.points]
    assert NUM_POINTS / 3 < len(times) <= NUM_POINTS
    assert times[0] < 50
    assert times[-1] > 4900
    assert times == sorted(times)


def test_values_are_means_over_ranks_and_what_is_no_number_stays_visible() -> None:
    status = JobStatus(["python", "-u", "/a/train.py", "--lr", "x.py"], 2, is_elastic=False, now=0.0, time=0.0)
    for rank in (0, 1):
        status.happened("started", {"worker": rank, "host": 0}, now=0.0, time=0.0)
    fields = {"generation": 0, "world_size": 2, "workers": [0, 1], "progress": 0}
    status.happened("generation", fields, now=0.0, time=0.0)
    assert status.summary(now=1.0) == ""
    for second in range(3):
        for rank in (0, 1):
            status.progressed(rank, told(float(second), second, loss=1.0 + rank, grad=math.nan), now=float(second))
        status.turn(float(second))
    found = status.as_fields(now=2.0)
    json.loads(json.dumps(found, allow_nan=False))
    assert found["title"] == "train.py"
    assert found["values"] == {"loss": 1.5, "grad": "nan"}
    assert (found["steps"], found["steps_per_sec"], found["samples_per_sec"]) == (2, 1.0, 16.0)
    assert [point["elapsed_sec"] for point in found["history"]] == [1.0, 2.0]
    assert status.summary(now=2.0) == "2 ranks  step 2  1 steps/s  16 samples/s  loss 1.5  grad nan"


def test_the_title_is_the_script_or_module_else_the_program() -> None:
    assert title_of(["/usr/bin/python", "-m", "my.train", "x.py"]) == "my.train"
    assert title_of(["/opt/train.sh", "1"]) == "train.sh"
