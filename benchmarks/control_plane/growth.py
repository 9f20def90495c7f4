"""Measures jobs of several sizes, and shows how what they cost grows with the number of workers."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from rich.table import Table

from benchmarks.control_plane.scenario import STEADY_SEC, Figures
from benchmarks.jobs import ROOT
from benchmarks.report import duration

KINDS = ("elastic", "fixed")
_TIMEOUT_SEC = 900
_FILES_PER_WORKER = 3

_COLUMNS: dict[str, tuple[str, ...]] = {
    "elastic": (
        *("hosts_joined", "formed", "met", "noticed", "reformed", "whole", "crowd", "crowd_noticed", "crowd_reformed"),
        *("form_cpu", "worker_form_cpu", "steady_cpu", "worker_steady_cpu", "beats", "memory"),
    ),
    "fixed": (
        *("hosts_joined", "met", "exchanged", "noticed", "form_cpu", "worker_form_cpu", "exchange_cpu"),
        *("worker_exchange_cpu", "steady_cpu", "worker_steady_cpu", "memory"),
    ),
}


def measure(kind: str, num_workers: int, *, repetitions: int = 1, steady_sec: float = STEADY_SEC) -> Figures:
    """Run a job of simulated workers in separate processes and return the medians of its figures.

    Args:
        kind: of the job, "elastic" or "fixed".
        num_workers: of the job.
        repetitions: jobs that are run, one after another.
        steady_sec: for how long all workers only train.

    Raises:
        ValueError: this machine does not let a process open as many files as the launcher needs.
    """
    raise_limit(_FILES_PER_WORKER * num_workers + 256)
    found = [_measure_once(kind, num_workers, steady_sec) for _ in range(repetitions)]
    medians = {
        each.name: statistics.median(getattr(figures, each.name) for figures in found) for each in fields(Figures)
    }
    return Figures(**medians)


def raise_limit(wanted: int) -> None:
    """Let this process, and those that it starts, open so many files.

    Raises:
        ValueError: the limit of this user is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ValueError(f"{wanted} open files are needed, and the hard limit is {hard}; `ulimit -Hn` says it")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def tables(found: Mapping[str, Mapping[int, Figures]]) -> list[Table]:
    """Return a table for each kind of job: a line for each quantity, a column for each size."""
    made = []
    for kind, by_size in found.items():
        table = Table(title=f"{kind} job of simulated workers, eight on each host", show_lines=False)
        table.add_column("workers")
        for size in by_size:
            table.add_column(str(size), justify="right")
        for name in _COLUMNS[kind]:
            table.add_row(name, *(_text(name, getattr(figures, name)) for figures in by_size.values()))
        made.append(table)
    return made


def as_fields(found: Mapping[str, Mapping[int, Figures]]) -> dict[str, list[dict[str, float]]]:
    """Return plain data."""
    return {kind: [asdict(figures) for figures in by_size.values()] for kind, by_size in found.items()}


def _text(name: str, value: float) -> str:
    if name == "crowd":
        return f"{value:g}"
    if name == "beats":
        return f"{value:.2f}/s"
    if name == "memory":
        return f"{value / 1024:.1f} KiB"
    return duration(value) + ("/s" if "steady" in name else "")


def _measure_once(kind: str, num_workers: int, steady_sec: float) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder) / "figures.json", Path(folder) / "log"
        command: Sequence[str] = (
            sys.executable,
            "-m",
            "benchmarks.control_plane.job",
            kind,
            str(num_workers),
            str(steady_sec),
            str(output),
        )
        with log.open("wb") as file:
            ended = subprocess.run(
                command, cwd=ROOT, timeout=_TIMEOUT_SEC, check=False, stdout=file, stderr=subprocess.STDOUT
            )
        if ended.returncode or not output.exists():
            raise RuntimeError(f"a job of {num_workers} workers failed:\n{log.read_text()[-4000:]}")
        return Figures(**json.loads(output.read_text()))
