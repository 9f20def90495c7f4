"""The elastic examples, with a rank killed in the middle."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from elastic_job import ElasticJob

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.parallel, pytest.mark.soak]


@pytest.mark.parametrize(
    ("name", "least"),
    [("torch_digits.py", 0.85), ("train_step.py", 0.85), ("keras_fit.py", 0.85), ("keras_flag.py", 0.85)],
)
def test_it_comes_to_its_end_though_a_rank_is_killed(name: str, least: float, tmp_path: Path) -> None:
    script = ROOT / "examples" / "elastic" / name
    options, quiet = ["-np", "3", "--min-np", "2"], {"TF_CPP_MIN_LOG_LEVEL": "3"}
    with ElasticJob.start(tmp_path, options, [str(script), "--pace", "0.05"], quiet) as job:
        job.wait_for(r"rank 2 of 3, epoch 0, .*", seconds=240)
        (victim,) = [event["pid"] for event in job.events("process") if event["worker"] == 1]
        os.kill(victim, signal.SIGKILL)
        assert job.end(seconds=240) == 0, job.lines
    found = {float(text) for (text,) in job.said(r"accuracy (0\.\d+), .*")}
    assert len(found) == 1
    assert found.pop() >= least
    assert len(job.events("lost")) == 1
