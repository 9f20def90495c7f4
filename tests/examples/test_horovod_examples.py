"""Horovod-style scripts: under `unidist launch`, and, with the import changed back, under horovodrun: same losses."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "horovod"
OUR_IMPORT, HOROVODS_IMPORT = "import unidist.torch as hvd", "import horovod.torch as hvd"
UNIDIST = ("-m", "unidist_launch", "launch")
HOROVODRUN = ("-m", "horovod.runner.launch")
# Sums of several threads depend on how many there are.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

pytestmark = [pytest.mark.parallel, pytest.mark.slow]
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed (`unidist build horovod`)"
)


def run(launcher: tuple[str, ...], script: Path, *arguments: str) -> str:
    """Run a script on two ranks and return rank 0's standard output, without prefixes."""
    command = [sys.executable, *launcher, "-np", "2", sys.executable, str(script), *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **ONE_THREAD}, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return "\n".join(re.findall(r"^\[0\](?:<stdout>:| )(.*)$", done.stdout, re.MULTILINE))


def for_horovod(script: str, folder: Path) -> Path:
    """Return a copy of an example that imports Horovod, and differs in nothing else."""
    text = (EXAMPLES / script).read_text(encoding="utf-8")
    assert text.count(OUR_IMPORT) == 1
    copy = folder / script
    copy.write_text(text.replace(OUR_IMPORT, HOROVODS_IMPORT), encoding="utf-8")
    return copy


def losses(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"(?:train|test) loss ([\d.]+)", output)]


def rates(output: str) -> tuple[float, float]:
    """Return the rates that the benchmark prints, of one rank and of all."""
    one = re.search(r"^Img/sec per rank: ([\d.]+) \+-[\d.]+$", output, re.MULTILINE)
    total = re.search(r"^Total img/sec on 2 rank\(s\): ([\d.]+) \+-[\d.]+$", output, re.MULTILINE)
    assert one is not None, output
    assert total is not None, output
    return float(one[1]), float(total[1])


@pytest.fixture(scope="module")
def digits() -> str:
    """What the digits example prints under `unidist launch`."""
    return run(UNIDIST, EXAMPLES / "digits.py")


def test_digits_learns_to_read(digits: str) -> None:
    assert losses(digits)[0] > 2
    accuracy = re.findall(r"accuracy ([\d.]+)%", digits)
    assert len(accuracy) == 8
    assert float(accuracy[-1]) > 95


@needs_horovod
@pytest.mark.parametrize(
    ("option", "tolerance"),
    [
        pytest.param((), 1e-5, id="float32"),
        pytest.param(("--fp16-allreduce",), 1e-3, marks=pytest.mark.soak, id="fp16"),
    ],
)
def test_digits_prints_the_losses_that_it_prints_under_horovodrun(
    tmp_path: Path, digits: str, option: tuple[str, ...], tolerance: float
) -> None:
    arguments = ("--epochs", "3", *option)
    ours = losses(run(UNIDIST, EXAMPLES / "digits.py", *arguments) if option else digits)[:6]
    theirs = losses(run(HOROVODRUN, for_horovod("digits.py", tmp_path), *arguments))
    assert len(theirs) == 6
    assert ours == pytest.approx(theirs, abs=tolerance)
    assert ours[-2] < ours[0] - 0.5  # it has learnt something, so the gradients counted


SMALL = ("--num-iters", "3", "--num-warmup-batches", "1", "--num-batches-per-iter", "1", "--batch-size", "4")


@pytest.mark.parametrize(
    "option",
    [
        pytest.param((), id="plain"),
        pytest.param(("--fp16-allreduce",), marks=pytest.mark.soak, id="fp16"),
        pytest.param(("--use-adasum",), marks=pytest.mark.soak, id="adasum"),
    ],
)
def test_the_benchmark_tells_images_per_second_of_a_rank_and_of_all(option: tuple[str, ...]) -> None:
    output = run(UNIDIST, EXAMPLES / "synthetic_benchmark.py", *SMALL, "--width", "8", *option)
    assert len(re.findall(r"^Iter #\d: [\d.]+ img/sec per rank$", output, re.MULTILINE)) == 3
    one, total = rates(output)
    assert total == pytest.approx(2 * one, abs=0.2)


@needs_horovod
@pytest.mark.soak  # the digits example shows above that what is written for us runs under horovodrun
def test_the_benchmark_runs_under_horovodrun(tmp_path: Path) -> None:
    script = for_horovod("synthetic_benchmark.py", tmp_path)
    one, total = rates(run(HOROVODRUN, script, *SMALL, "--width", "8"))
    assert total == pytest.approx(2 * one, abs=0.2)
