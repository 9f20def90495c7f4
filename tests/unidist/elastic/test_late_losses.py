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


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("engine", "end"), [("shm", KILLED), ("tcp", KILLED), ("gloo", KILLED), ("shm", RAISES)], ids=str
)
def test_a_rank_that_is_late_and_then_lost_does_not_take_the_others_along(
    engine: str, end: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(script(setup=LATE.format(end=end), in_step="late(state)"))
    options = ["-np", "3", "--min-np", "2", "--engine", engine]
    with ElasticJob.start(tmp_path, options, ["script.py", str(STEPS), "0"]) as job:
        assert job.end() == 0, job.lines
    assert not any("DeadlockError" in line for line in job.lines), job.lines
    assert job.totals() == {total(STEPS)}
    assert len(job.said(r"enter \d \d 0 \d+")) == 3, "nobody began again"
    assert {job.pid(0, 3), job.pid(1, 3)} <= job.survivors()
