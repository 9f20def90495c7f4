"""The digits example in JAX learns to read, however it is started."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

pytest.importorskip("jax", reason="the example is in JAX")
pytestmark = [pytest.mark.parallel, pytest.mark.slow]

Run = Callable[..., str]


def final_accuracy(output: str, *, num_proc: int) -> float:
    found = re.search(rf"after \d+ epochs on {num_proc} process\(es\): ([\d.]+)%", output)
    assert found is not None, output
    return float(found[1])


def test_two_processes_read_over_95_percent(run_example: Run) -> None:
    output = run_example("digits.py", num_proc=2)
    assert final_accuracy(output, num_proc=2) > 95
    losses = [float(text) for text in re.findall(r": loss ([\d.]+)", output)]
    assert losses[-1] < losses[0] / 5


@pytest.mark.soak
def test_it_runs_alone(run_example: Run) -> None:
    assert final_accuracy(run_example("digits.py", "--epochs", "4"), num_proc=1) > 93


@pytest.mark.soak
def test_accumulation_is_chosen_without_touching_it(run_example: Run) -> None:
    output = run_example("digits.py", "--batch-size", "16", num_proc=2, launch=("--strategy", "accumulate=2"))
    assert final_accuracy(output, num_proc=2) > 95
