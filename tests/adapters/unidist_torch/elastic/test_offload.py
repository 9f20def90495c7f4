"""PyTorch with optimizer state in files, on ranks that come and go: the numbers of one process, no file too many."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_job import ElasticJob

# At the end each rank says which files of the folder it has mapped.
SCRIPT = (
    runpy.run_path(str(Path(__file__).with_name("test_generations.py")))["SCRIPT"]
    + """
import gc
gc.collect()
maps = [line.split()[4:6] for line in open("/proc/self/maps") if "/files/unidist-" in line]
say("files", os.getpid(), len(set(map(tuple, maps))))
"""
)


def parameters(text: str) -> list[float]:
    return [float(item) for item in text.split(";")]


@pytest.mark.parallel
@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["zero=3:offload=files", "zero=1:offload=files"])
def test_a_killed_rank_is_replaced_and_the_result_is_that_of_one_process(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "files").mkdir()
    alone = subprocess.run(
        [sys.executable, "script.py", "1", "data"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=tmp_path,
    )
    (wanted,) = [parameters(line.split()[1]) for line in alone.stdout.splitlines() if line.startswith("done ")]
    options = ["-np", "3", "--min-np", "1", "--strategy", strategy]
    with ElasticJob.start(tmp_path, options, ["script.py", "3", strategy]) as job:
        killed = job.pid(1, 3)
        job.wait_for(r"step 2 \d")
        os.kill(killed, signal.SIGKILL)
        assert job.end(seconds=300) == 0, job.lines
    results = [parameters(text) for (text,) in job.said(r"done (\S+) \d+ \d+")]
    assert len(results) == 3
    for result in results:
        assert result == pytest.approx(wanted, rel=1e-12, abs=1e-12)
    assert [event["world_size"] for event in job.events("generation")] == [3, 2, 3]
    counts = [int(count) for (count,) in job.said(r"files \d+ (\d+)")]
    assert len(counts) == 3
    assert len(set(counts)) == 1, counts  # those of earlier generations are given back
    assert counts[0] > 0
    assert list((tmp_path / "files").iterdir()) == []
