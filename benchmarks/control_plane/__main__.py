"""Measure the control plane with more and more workers, print tables, write out/control_plane.json."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console

from benchmarks.control_plane.growth import KINDS, as_fields, measure, tables
from benchmarks.control_plane.scenario import Figures
from benchmarks.jobs import ROOT

SIZES = (10, 100, 500, 1000, 2000, 4000)


@click.command()
@click.option("--workers", multiple=True, type=click.IntRange(min=2), help="Number of workers; may be repeated.")
@click.option("--kind", multiple=True, type=click.Choice(KINDS), help="Kind of job; default: both.")
@click.option("--repetitions", default=1, show_default=True, help="Jobs of each size, of which the medians are shown.")
@click.option("--output-dir", type=click.Path(path_type=Path), default=ROOT / "out", show_default="out/")
def main(workers: tuple[int, ...], kind: tuple[str, ...], repetitions: int, output_dir: Path) -> None:
    """Measure the launcher, agents and rendezvous of jobs of simulated workers. Wants a quiet machine.

    Times are those of the clock, from an event until the last worker has seen it. Processor times are those of the
    launcher (form_cpu, steady_cpu) and of the simulated hosts and workers (worker_...), for each worker.
    """
    found: dict[str, dict[int, Figures]] = {}
    for each in kind or KINDS:
        for number in workers or SIZES:
            click.echo(f"measuring: {each}, {number} workers ...")
            found.setdefault(each, {})[number] = measure(each, number, repetitions=repetitions)
    console = Console(width=150)
    for table in tables(found):
        console.print(table)
    output_dir.mkdir(parents=True, exist_ok=True)
    path = output_dir / "control_plane.json"
    path.write_text(json.dumps(as_fields(found), indent=2))
    click.echo(f"written: {path}")


if __name__ == "__main__":
    main()
