"""The example with Hugging Face's Trainer learns to read, and is resumed by another number of ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from unidist_command import Command

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

SCRIPT = str(Path(__file__).parents[3] / "examples/transformers/digits.py")


def accuracy(done: subprocess.CompletedProcess[str], epochs: int, num_proc: int) -> float:
    assert done.returncode == 0, done.stderr
    found = re.search(rf"after {epochs} epochs on {num_proc} process\(es\): ([\d.]+)%", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


def test_it_learns_on_two_ranks_and_is_resumed_by_one(command: Command) -> None:
    words = ["launch", "-np", "2", "--strategy", "zero=2", SCRIPT, "--epochs", "4", "--checkpoints", "runs"]
    assert accuracy(command.run(*words, env={"OMP_NUM_THREADS": "1"}), 4, 2) > 60
    (saved,) = (command.folder / "runs").glob("checkpoint-*")
    again = [sys.executable, SCRIPT, "--epochs", "8", "--batch-size", "32", "--resume", str(saved)]
    done = subprocess.run(again, cwd=command.folder, capture_output=True, text=True, timeout=300, check=False)
    assert accuracy(done, 8, 1) > 80
