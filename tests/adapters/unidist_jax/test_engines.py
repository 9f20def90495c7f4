"""Every engine carries what compiled programs exchange: the numbers of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mpi_pool
import pytest

_SCRIPT = str(Path(__file__).with_name("_engines.py"))


@pytest.mark.parallel
@pytest.mark.parametrize("engine", ["shm", "tcp", "gloo", "mpi"])
def test_operations_and_training(engine: str) -> None:
    if engine == "gloo":
        pytest.importorskip("torch", reason="gloo is PyTorch's")
    if engine == "mpi":
        pytest.importorskip("mpi4py")
        words = mpi_pool.command(2, _SCRIPT)
    else:
        words = [sys.executable, "-m", "unidist_launch", "launch", "-np", "2", "--engine", engine, _SCRIPT]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where mpirun is
    environ = {**os.environ, "UNIDIST_ENGINE": engine, "PATH": path}
    found = subprocess.run(words, capture_output=True, text=True, timeout=180, env=environ)
    assert found.returncode == 0, found.stderr
    assert all(f"rank {rank} is done" in found.stdout for rank in range(2))
