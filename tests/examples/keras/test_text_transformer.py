"""The Keras transformer learns, and its text sample comes out, however it is started."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

Run = Callable[..., str]
SMALL = ("--layers", "1", "--width", "64", "--context", "64", "--modules", "20", "--sample", "40")


def validation_losses(output: str) -> list[float]:
    """Return what was found after each epoch; the perplexities beside them fit."""
    found = re.findall(r"^step \d+: loss [\d.]+, validation loss ([\d.]+), perplexity ([\d.]+)$", output, re.MULTILINE)
    losses = [float(loss) for loss, _ in found]
    assert [float(perplexity) for _, perplexity in found] == pytest.approx([math.exp(loss) for loss in losses], abs=0.1)
    return losses


@pytest.mark.parametrize(
    ("num_proc", "steps", "launch"),
    [
        pytest.param(None, "64", (), marks=pytest.mark.soak, id="alone"),
        pytest.param(2, "64", (), id="two processes"),
        pytest.param(2, "128", ("--strategy", "accumulate=2"), marks=pytest.mark.soak, id="accumulate=2"),
        pytest.param(2, "64", ("--strategy", "zero=1"), marks=pytest.mark.soak, id="zero=1"),
        pytest.param(2, "64", ("--strategy", "zero=2"), marks=pytest.mark.soak, id="zero=2"),
        pytest.param(2, "64", ("--strategy", "zero=3"), marks=pytest.mark.soak, id="zero=3"),
        pytest.param(2, "64", ("--strategy", "pipeline=2,clip_norm=1"), marks=pytest.mark.soak, id="pipeline=2"),
        pytest.param(2, "64", ("--strategy", "tensor=2"), marks=pytest.mark.soak, id="tensor=2"),
    ],
)
def test_the_loss_falls_and_a_sample_is_written(
    run_example: Run, tmp_path: Path, num_proc: int | None, steps: str, launch: tuple[str, ...]
) -> None:
    picture = tmp_path / "text.png"
    arguments = (*SMALL, "--steps", steps, "--plot", str(picture))
    output = run_example("text_transformer.py", *arguments, num_proc=num_proc, launch=launch)
    losses = validation_losses(output)
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5
    assert losses[-1] < 3.0  # guessing gives 4.6, how frequent each character is about 3.2
    sample = output.partition("---- a sample ----\n")[2]
    assert sample.startswith("def ")
    assert len(sample) >= 30
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
def test_the_default_size_learns_to_write_something_like_python(run_example: Run) -> None:
    output = run_example("text_transformer.py", num_proc=2)
    assert validation_losses(output)[-1] < 2.2
    assert len(output.partition("---- a sample ----\n")[2]) > 300
