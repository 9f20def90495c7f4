"""The examples for Ray and Optuna run, and a pruned trial leaves no process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from unidist_command import Command

pytest.importorskip("ray", reason="needs Ray: make test-integrations")
pytest.importorskip("optuna", reason="needs Optuna: make test-integrations")

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[3] / "examples/ray"


def run(command: Command, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(EXAMPLES / name), *arguments]
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    with command.start_words(words, env=env) as process:
        out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def left_over(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_pruned_trial_leaves_no_process(command: Command) -> None:
    done = run(command, "tune_optuna.py")
    assert done.returncode == 0, done.stderr
    assert len(re.findall("pruned, loss None", done.stdout)) == 2
    assert "best rate: 0.1" in done.stdout
    assert left_over(command.mark) == []


def test_digits_are_read_by_ranks_in_actors(command: Command) -> None:
    done = run(command, "digits.py")
    assert done.returncode == 0, done.stderr
    found = re.search(r"test accuracy on 2 ranks: ([\d.]+)%", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) > 85
