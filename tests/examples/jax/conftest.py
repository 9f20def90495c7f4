"""Runs the examples as a user does: in a process of their own, alone or under `unidist launch`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

Run = Callable[..., str]


@pytest.fixture
def run_example() -> Run:
    """Run `examples/jax/NAME ARGUMENTS` and return its standard output, without the prefixes of ranks."""

    def run(name: str, *arguments: str, num_proc: int | None = None, launch: tuple[str, ...] = ()) -> str:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable]
        if num_proc is not None:
            command += ["-m", "unidist_launch", "launch", "-np", str(num_proc), *launch]
        command += [f"examples/jax/{name}", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return "\n".join(line.partition("] ")[2] if line.startswith("[") else line for line in done.stdout.splitlines())

    return run
