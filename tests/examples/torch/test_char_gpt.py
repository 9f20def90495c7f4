"""The GPT example learns, and its text sample comes out, however it is started."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

Run = Callable[..., str]
SMALL = ("--steps", "60", "--layers", "1", "--width", "64", "--context", "64", "--modules", "20", "--sample", "40")


def validation_losses(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"validation loss ([\d.]+)", output)]


@pytest.mark.parametrize(
    ("num_proc", "launch"),
    [
        pytest.param(None, (), marks=pytest.mark.soak, id="alone"),
        pytest.param(2, (), id="two processes"),
        pytest.param(2, ("--strategy", "accumulate=2"), marks=pytest.mark.soak, id="accumulate=2"),
        pytest.param(2, ("--engine", "gloo"), marks=pytest.mark.soak, id="gloo"),
        pytest.param(2, ("--strategy", "zero=1"), marks=pytest.mark.soak, id="zero=1"),
        pytest.param(2, ("--strategy", "zero=2"), marks=pytest.mark.soak, id="zero=2"),
        pytest.param(2, ("--strategy", "zero=3"), marks=pytest.mark.soak, id="zero=3"),
        pytest.param(2, ("--strategy", "pipeline=2:schedule=zbv"), marks=pytest.mark.soak, id="pipeline"),
        pytest.param(
            4, ("--strategy", "pipeline=2,tensor=2,clip_norm=1"), marks=pytest.mark.soak, id="pipeline and tensor"
        ),
    ],
)
def test_the_loss_falls_and_a_sample_is_written(
    run_example: Run, num_proc: int | None, launch: tuple[str, ...]
) -> None:
    output = run_example("char_gpt.py", *SMALL, num_proc=num_proc, launch=launch)
    losses = validation_losses(output)
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.8
    sample = output.partition("---- a sample ----\n")[2]
    assert sample.startswith("def ")
    assert len(sample) >= 30


@pytest.mark.soak
def test_the_default_size_learns_to_write_something_like_python(run_example: Run) -> None:
    output = run_example("char_gpt.py", num_proc=2)
    assert validation_losses(output)[-1] < 2.2
    assert len(output.partition("---- a sample ----\n")[2]) > 300
