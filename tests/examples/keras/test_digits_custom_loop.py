"""The Keras digits example with its own loop learns to read, however it is started."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

Run = Callable[..., str]


def accuracy(output: str, *, num_proc: int) -> float:
    found = re.search(rf"^accuracy ([\d.]+)% on 360 images, {num_proc} ranks", output, re.MULTILINE)
    assert found is not None, output
    return float(found[1])


def losses(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"^epoch \d+: loss ([\d.]+)", output, re.MULTILINE)]


@pytest.mark.soak  # as is the next test, but for the accumulation; `fit` on two processes is in test_digits_fit
def test_two_processes_read_over_95_percent(run_example: Run) -> None:
    output = run_example("digits_custom_loop.py", num_proc=2)
    assert accuracy(output, num_proc=2) > 95
    assert len(losses(output)) == 8
    assert losses(output)[-1] < losses(output)[0] / 5


@pytest.mark.soak
def test_it_runs_alone_and_draws_its_curves(run_example: Run, tmp_path: Path) -> None:
    picture = tmp_path / "loop.svg"
    output = run_example("digits_custom_loop.py", "--epochs", "4", "--plot", str(picture))
    assert accuracy(output, num_proc=1) > 93
    assert "</svg>" in picture.read_text(encoding="utf-8")


@pytest.mark.soak
def test_accumulation_is_chosen_without_touching_it(run_example: Run) -> None:
    """45 batches of a rank are 22 windows of two, and a short one for `flush`."""
    arguments = ("--batch-size", "16", "--epochs", "6")
    output = run_example("digits_custom_loop.py", *arguments, num_proc=2, launch=("--strategy", "accumulate=2"))
    assert accuracy(output, num_proc=2) > 93
