"""The Keras digits example is the same script where Keras runs on JAX."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="Keras runs on JAX here")
if importlib.util.find_spec("keras") is None:
    pytest.skip("Keras is not installed", allow_module_level=True)
pytestmark = [pytest.mark.parallel, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("strategy", ["data", pytest.param("zero=2", marks=pytest.mark.soak)])
def test_two_processes_read_over_95_percent(strategy: str) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"}
    command = [sys.executable, "-m", "unidist_launch", "launch", "-np", "2", "--strategy", strategy]
    done = subprocess.run(
        [*command, "examples/keras/digits_fit.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.search(r"accuracy ([\d.]+)% on 360 images, 2 ranks", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) > 95
    losses = [float(text) for text in re.findall(r" loss: ([\d.]+)", done.stdout)]
    assert losses[-1] < losses[0] / 5
