"""A rank that is late, so that the others wait for seconds, and is then lost: the others go on without it."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_job import ElasticJob, script, total

STEPS = 4
# A validation, a checkpoint or a stuck file system before the crash; the others wait in a named operation.
LATE = """
from unidist.negotiation import allgather_object

def late(state):
    if state.step == 2 and os.environ["UNIDIST_WORKER"] == "2":
        time.sleep(4)  # the others are found to be blocked after 2
        {end}
    allgather_object(context.current().operations(), state.step, name="metrics")
"""
KILLED = "os.kill(os.getpid(), 9)"
RAISES = 'raise ValueError("on purpose")'
STOPS = "os.kill(os.getpid(), 19)"
HANGS = "time.sleep(1000)"


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("engine", "end", "options"),
    [
        ("shm", KILLED, ()),
        ("tcp", KILLED, ()),
        ("gloo", KILLED, ()),
        ("shm", RAISES, ()),
        ("shm", STOPS, ("--env", "UNIDIST_HEARTBEAT_SEC=2")),
        ("tcp", STOPS, ("--env", "UNIDIST_HEARTBEAT_SEC=2")),
        ("shm", HANGS, ("--step-timeout", "6")),
        ("gloo", HANGS, ("--step-timeout", "6")),
        ("shm", HANGS, ("--stall-shutdown", "6")),
        ("tcp", HANGS, ("--stall-shutdown", "6")),
    ],
    ids=str,
)
def test_a_rank_that_is_late_and_then_lost_does_not_take_the_others_along(
    engine: str, end: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(script(setup=LATE.format(end=end), in_step="late(state)"))
    launch = ["-np", "3", "--min-np", "2", "--engine", engine, *options]
    with ElasticJob.start(tmp_path, launch, ["script.py", str(STEPS), "0"]) as job:
        assert job.end() == 0, job.lines
    assert not any("DeadlockError" in line for line in job.lines), job.lines
    assert job.totals() == {total(STEPS)}
    assert len(job.said(r"enter \d \d 0 \d+")) == 3, "nobody began again"
    assert {job.pid(0, 3), job.pid(1, 3)} <= job.survivors()
