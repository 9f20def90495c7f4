"""The Keras digits example learns to read, however it is started."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

Run = Callable[..., str]


def accuracy(output: str, *, num_proc: int) -> float:
    found = re.search(rf"accuracy ([\d.]+)% on 360 images, {num_proc} ranks", output)
    assert found is not None, output
    return float(found[1])


def test_two_processes_read_over_95_percent(run_example: Run, tmp_path: Path) -> None:
    picture = tmp_path / "curves" / "fit.png"
    output = run_example("digits_fit.py", "--plot", str(picture), num_proc=2)
    assert accuracy(output, num_proc=2) > 95
    assert picture.read_bytes().startswith(b"\x89PNG")
    losses = [float(text) for text in re.findall(r" loss: ([\d.]+)", output)]
    assert len(losses) == 8
    assert losses[-1] < losses[0] / 5


@pytest.mark.soak
def test_it_runs_alone(run_example: Run) -> None:
    assert accuracy(run_example("digits_fit.py", "--epochs", "4"), num_proc=1) > 93


@pytest.mark.soak
def test_accumulation_is_chosen_without_touching_it(run_example: Run) -> None:
    output = run_example("digits_fit.py", "--batch-size", "16", num_proc=2, launch=("--strategy", "accumulate=2"))
    assert accuracy(output, num_proc=2) > 95
