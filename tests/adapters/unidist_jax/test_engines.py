"""Every engine carries what compiled programs exchange: the numbers of one process."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mpi_pool
import pytest

_SCRIPT = str(Path(__file__).with_name("_engines.py"))


@pytest.mark.parallel
@pytest.mark.parametrize("engine", ["shm", "tcp", "gloo", "mpi"])
def test_operations_and_training(engine: str) -> None:
    if engine == "mpi":
        if importlib.util.find_spec("mpi4py") is None or shutil.which("mpirun") is None:
            pytest.skip("mpi4py and mpirun are not installed")
        words = mpi_pool.command(2, _SCRIPT)
    else:
        words = [sys.executable, "-m", "unidist_launch", "launch", "-np", "2", "--engine", engine, _SCRIPT]
    environ = {**os.environ, "UNIDIST_ENGINE": engine}
    found = subprocess.run(words, capture_output=True, text=True, timeout=180, env=environ)
    assert found.returncode == 0, found.stderr
    assert all(f"rank {rank} is done" in found.stdout for rank in range(2))
