"""Measure unidist beside its peers, print a table, write out/bench.json and out/bench.png."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from benchmarks import launch_time
from benchmarks.report import Row, duration, save, show

_ROOT = Path(__file__).resolve().parent.parent


def _on_ranks(module: str, num_proc: int, repetitions: int) -> dict[str, float]:
    """Run a benchmark module under `unidist launch` and return its medians."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "medians.json"
        command = [sys.executable, "-m", "unidist_launch", "launch", "-np", str(num_proc), "--env", "OMP_NUM_THREADS=1"]
        subprocess.run([*command, "-m", module, str(output), str(repetitions)], check=True, cwd=_ROOT, timeout=1800)
        medians: dict[str, float] = json.loads(output.read_text())
    return medians


def _under_horovodrun(engine: str, repetitions: int) -> dict[str, float]:
    """Run `benchmarks.horovod_beside` on two ranks of Horovod and return its medians."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as probe:
        output, port = Path(folder) / "medians.json", probe.getsockname()[1]
        probe.close()
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "UNIDIST_ENGINE": engine,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        command = [str(Path(sys.executable).with_name("horovodrun")), "-np", "2", sys.executable]
        arguments = ["-m", "benchmarks.horovod_beside", str(output), str(repetitions)]
        subprocess.run([*command, *arguments], check=True, cwd=_ROOT, timeout=1800, env=env)
        medians: dict[str, float] = json.loads(output.read_text())
    return medians


def _horovod_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    if importlib.util.find_spec("horovod") is None:
        click.echo("Horovod is not installed (unidist build horovod): it is left out")
        return []
    click.echo("measuring beside Horovod, unidist over shm ...")
    beside = groups["beside Horovod, np=2"] = _under_horovodrun("shm", repetitions)
    click.echo("measuring beside Horovod, unidist over Horovod ...")
    through = groups["through Horovod, np=2"] = _under_horovodrun("horovod", repetitions)
    rows = []
    for what, target in (("GPT step", 1.3), ("100 MB", 1.0), ("4 KB", 1.0)):
        title = "GPT training step, np=2" if what == "GPT step" else f"all-reduce, np=2: {what}"
        rows.append(
            _faster(f"{title}, of Horovod", beside[f"{what}, unidist"], beside[f"{what}, Horovod"], target, "Horovod")
        )
    for what in ("GPT step", "100 MB", "4 KB"):
        ours, theirs = through[f"{what}, unidist"], through[f"{what}, Horovod"]
        detail = f"{duration(ours)}, Horovod {duration(theirs)}"
        rows.append(
            Row(f"engine horovod, np=2: {what}, of Horovod itself", ours / theirs, "x", "at most", 1.05, detail)
        )
    return rows


def _faster(what: str, ours: float, theirs: float, target: float, peer: str) -> Row:
    return Row(what, theirs / ours, "x", "at least", target, f"{duration(ours)}, {peer} {duration(theirs)}")


def _allreduce_rows(medians: dict[str, float], num_proc: int) -> list[Row]:
    where = f"all-reduce, np={num_proc}"
    large, small = medians["100 MB, gloo"], medians["4 KB, gloo"]
    wanted = (
        {"engine": 4.0, "ordinary": 1.8, "named": 2.0, "world": 5.0}
        if num_proc == 2
        else dict.fromkeys(("engine", "ordinary", "named", "world"), 1.0)
    )
    return [
        _faster(f"{where}: 100 MB, engine memory", medians["100 MB, engine memory"], large, wanted["engine"], "gloo"),
        _faster(
            f"{where}: 100 MB, ordinary memory", medians["100 MB, ordinary memory"], large, wanted["ordinary"], "gloo"
        ),
        _faster(f"{where}: 4 KB, named", medians["4 KB, named"], small, wanted["named"], "gloo"),
        _faster(f"{where}: 4 KB, world()", medians["4 KB, world()"], small, wanted["world"], "gloo"),
    ]


@click.command()
@click.option("--repetitions", default=21, show_default=True, help="Counted repetitions of each measurement.")
@click.option("--output-dir", type=click.Path(path_type=Path), default=_ROOT / "out", show_default="out/")
def main(repetitions: int, output_dir: Path) -> None:
    """Measure unidist beside torch.distributed and torchrun. Takes some minutes; wants a quiet machine."""
    groups: dict[str, dict[str, float]] = {}
    rows: list[Row] = []
    for num_proc in (2, 4):
        title = f"all-reduce, np={num_proc}"
        click.echo(f"measuring {title} ...")
        medians = _on_ranks("benchmarks.allreduce", num_proc, repetitions)
        rows += _allreduce_rows(medians, num_proc)
        groups[f"{title}: 100 MB"] = {name: value for name, value in medians.items() if name.startswith("100 MB")}
        groups[f"{title}: 4 KB"] = {name: value for name, value in medians.items() if name.startswith("4 KB")}
    click.echo("measuring a training step of the GPT ...")
    step = groups["GPT step, np=2"] = _on_ranks("benchmarks.gpt_step", 2, repetitions)
    for peer, target in (("no communication", 1.08), ("DDP over gloo", 0.95)):
        rows.append(
            Row(
                f"GPT training step, np=2, of {peer}",
                step["unidist"] / step[peer],
                "x",
                "at most",
                target,
                f"{duration(step['unidist'])}, {peer} {duration(step[peer])}",
            )
        )
    rows += _horovod_rows(groups, repetitions)
    click.echo("measuring the launchers ...")
    launch = groups["launching np=2"] = launch_time.measure(max(3, repetitions // 3))
    ours, theirs = launch["unidist launch"], launch["torchrun"]
    rows.append(
        Row(
            "unidist launch of a trivial script",
            ours / theirs,
            "x",
            "at most",
            0.25,
            f"{duration(ours)}, torchrun {duration(theirs)}",
        )
    )
    helping = launch["unidist launch --help"]
    rows.append(Row("unidist launch --help", helping, "s", "at most", 0.25, duration(helping)))
    show(rows)
    save(output_dir, groups, rows)
    click.echo(f"written: {output_dir / 'bench.json'}, {output_dir / 'bench.png'}")


if __name__ == "__main__":
    main()
