"""The GPT example in JAX learns, and one rank and two give the same numbers."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

pytest.importorskip("jax", reason="the example is in JAX")
pytestmark = [pytest.mark.parallel, pytest.mark.slow]

Run = Callable[..., str]
SMALL = ("--steps", "40", "--modules", "12", "--layers", "2", "--width", "64", "--context", "32", "--sample", "20")


def validation_loss(output: str) -> float:
    found = re.search(r"validation loss after 40 steps on \d process\(es\): ([\d.]+)", output)
    assert found is not None, output
    return float(found[1])


def test_two_processes_learn_what_one_learns(run_example: Run) -> None:
    two = validation_loss(run_example("char_gpt.py", *SMALL, num_proc=2))
    assert two < 3.5  # 4.5 when it begins
    assert abs(validation_loss(run_example("char_gpt.py", *SMALL)) - two) < 0.01
