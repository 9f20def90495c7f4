"""Keras with optimizer state in files, on ranks that come and go: the numbers of one process, nothing left behind."""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path

import pytest

_GENERATIONS = runpy.run_path(str(Path(__file__).with_name("test_generations.py")))
# At the end each rank says which files of the folder it has mapped.
_MAPPED = """
import gc
gc.collect()
maps = [line.split()[4:6] for line in open("/proc/self/maps") if "/files/unidist-" in line]
say("files", os.getpid(), len(set(map(tuple, maps))))
"""


@pytest.mark.parallel
@pytest.mark.soak
@pytest.mark.parametrize(
    ("script", "strategy"),
    [
        pytest.param("FIT", "zero=1:offload=files", id="zero-1-fit"),
        pytest.param("FIT", "zero=3:offload=files", id="zero-3-fit"),
        pytest.param("LOOP", "zero=3:offload=files", id="zero-3-loop"),
    ],
)
def test_a_killed_rank_is_replaced_and_the_result_is_that_of_one_process(
    script: str, strategy: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(_GENERATIONS[script] + _MAPPED)
    (tmp_path / "files").mkdir()
    wanted = _GENERATIONS["undisturbed"](tmp_path, strategy, 1)
    with _GENERATIONS["start"](2, strategy, 1, tmp_path) as job:
        killed = job.pid(0, 2)
        job.wait_for(r"step 2 \d")
        os.kill(killed, signal.SIGKILL)
        assert job.end() == 0, job.lines
    results = [_GENERATIONS["parameters"](text) for (text,) in job.said(r"done (\S+) \d+ \d+")]
    assert len(results) == 2
    for result in results:
        assert result == pytest.approx(wanted, rel=1e-12, abs=1e-12)
    assert len(job.events("lost")) == 1
    counts = [int(count) for (count,) in job.said(r"files \d+ (\d+)")]
    assert len(counts) == 2
    assert min(counts) > 0
    assert list((tmp_path / "files").iterdir()) == []
