"""From `kill -9` of one of three ranks to the next completed step: unidist, Horovod's elastic jobs, torchrun."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.jobs import ROOT
from benchmarks.report import duration

SIZE = 3
GIVE_UP_SEC = 120.0
SPARE = "unidist --spares 1"
EVENTS = "events"
_SCRIPT = ROOT / "benchmarks" / "recovery_script.py"


@dataclass(frozen=True)
class Step:
    """A step that a rank completed."""

    time: float
    pid: int
    rank: int
    size: int
    number: int


@dataclass(frozen=True)
class Recovery:
    """What a kill cost.

    Args:
        next_step: seconds from the kill to the first step that was completed in a world formed after it; infinity if
            there was none within `GIVE_UP_SEC`.
        whole: seconds until a step was completed by as many ranks as before; infinity likewise.
        survivors: how many of the two processes that were not killed went on training.
    """

    next_step: float
    whole: float
    survivors: float

    def described(self) -> str:
        """Say it in words."""
        if self.next_step == float("inf"):
            return f"did not go on within {GIVE_UP_SEC:.0f} s"
        whole = "never" if self.whole == float("inf") else f"after {duration(self.whole)}"
        return f"{duration(self.next_step)}, {self.survivors:g} of {SIZE - 1} processes kept, all ranks again {whole}"


def median(found: Sequence[Recovery]) -> Recovery:
    """Return the median of each figure."""
    figures = ("next_step", "whole", "survivors")
    return Recovery(*(statistics.median(getattr(one, figure) for one in found) for figure in figures))


def measure(layers: Sequence[str], repetitions: int) -> dict[str, list[Recovery]]:
    """Kill a rank `repetitions` times under each of "unidist", "horovod" and "torchrun", which take turns."""
    found: dict[str, list[Recovery]] = {layer: [] for layer in layers}
    for _ in range(repetitions):
        for layer in layers:
            found[layer].append(recovery(layer))
    return found


def recovery(layer: str) -> Recovery:
    """Start a job, kill one of its ranks, and watch."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _job(_command(layer, folder), folder) as job:
            pids = {step.rank: step.pid for step in _wait_for_steps(folder, job) if step.size == SIZE}
            if layer == SPARE:
                _wait_for_spare(folder)
            os.kill(pids[SIZE - 1], signal.SIGKILL)
            return _watch(folder, job, time.time(), set(pids.values()))


def _watch(folder: Path, job: subprocess.Popen[bytes], killed: float, pids: set[int]) -> Recovery:
    """A world that was formed after the kill shows itself by other processes, or by another number of ranks."""
    known = len(_steps(folder))
    deadline = time.monotonic() + GIVE_UP_SEC
    next_step = whole = float("inf")
    survivors: set[int] = set()
    trained: set[int] = set()
    while time.monotonic() < deadline and len(trained) < SIZE and job.poll() is None:
        later = _steps(folder)[known:]
        reformed = [step for step in later if step.size != SIZE or step.pid not in pids]
        if reformed:
            next_step = min(step.time for step in reformed) - killed
            survivors = {step.pid for step in later if step.time >= killed + next_step} & pids
            full = [step for step in reformed if step.size == SIZE]
            whole = min(step.time for step in full) - killed if full else whole
            trained = {step.pid for step in later if step.size == SIZE and step.time >= killed + whole}
        time.sleep(0.01)
    return Recovery(next_step, whole, len(survivors))


def _command(layer: str, folder: Path) -> list[str]:
    script = [sys.executable, str(_SCRIPT), "unidist" if layer == SPARE else layer, str(folder)]
    if layer in ("unidist", SPARE):
        spares = ["--spares", "1", "--event-log", str(folder / EVENTS)] if layer == SPARE else []
        return [sys.executable, "-m", "unidist_launch", "launch", "-np", str(SIZE), "--min-np", "2", *spares, *script]
    if layer == "torchrun":
        run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={SIZE}", "--max-restarts=3"]
        return [sys.executable, *run, *script[1:]]
    # Two names of this host: Horovod gives up a whole host when one of its processes fails, here the one with one slot.
    discover = folder / "discover.sh"
    discover.write_text("#!/bin/sh\necho localhost:2\necho 127.0.0.1:1\n")
    discover.chmod(0o755)
    run = ["-np", str(SIZE), "--min-np", "2", "--max-np", str(SIZE), "--host-discovery-script", str(discover)]
    return [str(Path(sys.executable).with_name("horovodrun")), *run, "--blacklist-cooldown-range", "1", "2", *script]


@contextlib.contextmanager
def _job(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a job, and end it with all its processes."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "output").open("wb") as output:
        job = subprocess.Popen(command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield job
    finally:
        started = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
        job.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(10)
        job.kill()
        job.wait()
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _wait_for_steps(folder: Path, job: subprocess.Popen[bytes]) -> list[Step]:
    """Wait until the ranks have trained a while, and return their steps."""
    deadline = time.monotonic() + GIVE_UP_SEC
    while not (steps := _steps(folder)) or steps[-1].number < 20:
        if job.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{job.args!r} did not come to train:\n{(folder / 'output').read_text()[-4000:]}")
        time.sleep(0.05)
    return steps


def _wait_for_spare(folder: Path) -> None:
    deadline = time.monotonic() + GIVE_UP_SEC
    while '"standby"' not in (folder / EVENTS).read_text():
        if time.monotonic() > deadline:
            raise RuntimeError("no process came to stand by")
        time.sleep(0.05)


def _steps(folder: Path) -> list[Step]:
    path = folder / "steps"
    if not path.exists():
        return []
    rows = [line.split() for line in path.read_text().splitlines()]
    return [Step(float(row[0]), *map(int, row[1:])) for row in rows]
