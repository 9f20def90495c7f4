"""Trainers of other libraries over the backend `unidist` of torch.distributed: the weights are those over gloo.

Two ranks add two numbers, in whichever order: equal means bit for bit.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from field_scripts import SCRIPTS

MISSING = [name for name in ("transformers", "accelerate", "lightning") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (make test-integrations)"),
]

ROOT = Path(__file__).resolve().parents[2]
UNIDIST_LAUNCH = ["-m", "unidist_launch", "launch", "-np", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def train(name: str, backend: str, launcher: list[str], folder: Path) -> list[dict[str, object]]:
    """Run a script on two ranks, and return the weights of each."""
    import torch

    out = folder / f"{backend} {' '.join(launcher[:2])}"
    out.mkdir()
    script = SCRIPTS / "torch_backend" / name
    done = subprocess.run(
        [sys.executable, *launcher, str(script), "--backend", backend, "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(out / f"{rank}.pt") for rank in range(2)]


def same(one: dict[str, object], other: dict[str, object]) -> bool:
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        pytest.param("trainer.py", UNIDIST_LAUNCH, id="HF Trainer"),
        pytest.param("module.py", UNIDIST_LAUNCH, id="Lightning"),
        pytest.param("module.py", [], id="Lightning, which starts rank 1"),
        pytest.param("accelerate_loop.py", TORCHRUN, id="Accelerate"),
    ],
)
def test_two_ranks_train_bit_for_bit_as_over_gloo(name: str, launcher: list[str], tmp_path: Path) -> None:
    ours, theirs = (train(name, backend, launcher, tmp_path) for backend in ("unidist", "gloo"))
    for one, other in zip(ours, theirs, strict=True):
        assert same(one, other)
    buffers = ("num_batches_tracked", "running_mean", "running_var")  # of each rank's own batches
    plain = [{key: value for key, value in each.items() if not key.endswith(buffers)} for each in ours]
    assert same(*plain), "the ranks read different batches, and would differ without an exchange"
