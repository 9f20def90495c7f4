"""The tests' own pool of ranks under mpirun leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from mpi_pool import MpiPool, variables

pytestmark = pytest.mark.parallel


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    return condition()


def _gone(pids: Iterable[int]) -> bool:
    def state(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"

    return all(state(pid) in ("gone", "Z") for pid in pids)


def test_a_closed_pool_leaves_nothing(tmp_path: Path, leak_check: None) -> None:
    pool = MpiPool(2, tmp_path, variables({"UNIDIST_ENGINE": "mpi"}))
    pids = pool.run(os.getpid)
    pool.close()
    assert len(set(pids)) == 2
    assert _gone(pids)
    assert not list(tmp_path.iterdir())


def test_a_pool_dies_with_its_parent(tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import os, pathlib, time\n"
        "from mpi_pool import MpiPool, variables\n"
        f"pool = MpiPool(2, pathlib.Path({str(tmp_path)!r}), variables(None))\n"
        "print(*pool.run(os.getpid), pool.mpirun.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 3
        parent.send_signal(signal.SIGKILL)
    assert _wait_until(lambda: _gone(pids), 60)
