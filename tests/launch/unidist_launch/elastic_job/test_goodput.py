"""Ten minutes in which ranks are killed every 15 seconds, all of them together every other time: goodput."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from elastic_job import ElasticJob, script, total

pytestmark = [pytest.mark.parallel, pytest.mark.soak]

SECONDS = float(os.environ.get("UNIDIST_TEST_CHURN_SEC", "600"))
PAUSE_SEC = 15.0
PACE_SEC = 0.05


@pytest.mark.parametrize("size", [1, 2])
def test_goodput_is_seventy_percent_although_all_ranks_are_lost_again_and_again(tmp_path: Path, size: int) -> None:
    """Goodput: the time that the steps of the result take in a quiet job, divided by the time that the job took."""
    (tmp_path / "script.py").write_text(script())
    options = ["-np", str(size), "--min-np", "1", "--checkpoint-dir", "run", "--checkpoint-interval", "1"]
    began = time.monotonic()
    with ElasticJob.start(tmp_path, options, ["script.py", "1000000", str(PACE_SEC)]) as job:
        job.wait_for(r"step 60 .*")
        step_sec = _seconds_per_step(job)
        kills = 0
        while time.monotonic() - began < SECONDS:
            time.sleep(PAUSE_SEC)
            alive = _running(job)
            for pid in alive if kills % 2 else alive[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            kills += 1
        (tmp_path / "stop").touch()
        assert job.end() == 0, job.lines[-50:]
        elapsed = time.monotonic() - began
    (steps,) = job.steps()
    goodput = steps * step_sec / elapsed
    print(f"{size} ranks, {kills} kills in {elapsed:.0f} s: {steps} steps of {step_sec:.4f} s, goodput {goodput:.2f}")
    assert job.totals() == {total(steps)}
    assert goodput >= 0.7


def _running(job: ElasticJob) -> list[int]:
    """Return the processes of the ranks, of which most have had others before them."""
    ended = {event["pid"] for event in job.events("exit")}
    return [event["pid"] for event in job.events("process") if event["pid"] not in ended]


def _seconds_per_step(job: ElasticJob) -> float:
    found = [(int(step), float(at)) for step, at in job.said(r"step (\d+) 0 \d+ (\S+)")]
    return (found[-1][1] - found[10][1]) / (found[-1][0] - found[10][0])
