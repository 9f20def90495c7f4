"""The example with Lightning's Trainer learns to read, however it is started."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from unidist_command import Command

pytest.importorskip("lightning")

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

SCRIPT = str(Path(__file__).parents[3] / "examples/lightning/digits.py")


def accuracy(done: subprocess.CompletedProcess[str], epochs: int, num_proc: int) -> float:
    assert done.returncode == 0, done.stderr
    found = re.search(rf"after {epochs} epochs on {num_proc} process\(es\): ([\d.]+)%", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


def test_it_learns_on_two_ranks_and_is_resumed_by_one(command: Command) -> None:
    words = ["launch", "-np", "2", "--strategy", "zero=2,clip_norm=1", SCRIPT, "--epochs", "5", "--checkpoints", "runs"]
    assert accuracy(command.run(*words), 5, 2) > 90
    (saved,) = (command.folder / "runs").rglob("*.ckpt")
    again = [sys.executable, SCRIPT, "--epochs", "8", "--batch-size", "64", "--resume", str(saved)]
    done = subprocess.run(again, cwd=command.folder, capture_output=True, text=True, timeout=300, check=False)
    assert accuracy(done, 8, 1) > 95
