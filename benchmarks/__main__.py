"""Measure unidist beside its peers, print a table, write out/bench.json and out/bench.png."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from benchmarks import launch_time
from benchmarks.jobs import ROOT, free_ports, under_horovodrun, under_unidist
from benchmarks.report import Row, duration, save, show


def _horovod_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    click.echo("measuring beside Horovod, unidist over shm ...")
    beside = groups["beside Horovod, np=2"] = under_horovodrun("benchmarks.horovod_beside", "shm", repetitions)
    click.echo("measuring beside Horovod, unidist over Horovod ...")
    through = groups["through Horovod, np=2"] = under_horovodrun("benchmarks.horovod_beside", "horovod", repetitions)
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


def _keras_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    click.echo("measuring a training step in Keras ...")
    step = groups["Keras step, np=2"] = under_horovodrun("benchmarks.keras_step", "shm", repetitions)
    ports = ",".join(map(str, free_ports(2)))
    mirrored = under_unidist("benchmarks.keras_multiworker", 2, repetitions, ports)
    groups["MultiWorkerMirroredStrategy, np=2"] = mirrored
    rows = []
    for how in ("loop", "fit"):
        ours, alone = step[f"{how}, unidist"], step[f"{how}, no communication"]
        detail = f"{duration(ours)}, no communication {duration(alone)}"
        rows.append(Row(f"Keras step by {how}, np=2, of no communication", ours / alone, "x", "at most", 1.15, detail))
    ours, alone = step["loop, unidist"], step["loop, no communication"]
    rows.append(_faster("Keras step by loop, np=2, of Horovod's tape", ours, step["loop, Horovod"], 1.3, "Horovod"))
    # Of two jobs: each is compared with its own step without communication.
    theirs = mirrored["loop, MultiWorkerMirrored"] * alone / mirrored["loop, no communication"]
    rows.append(
        _faster("Keras step by loop, np=2, of MultiWorkerMirrored", ours, theirs, 1.0, "MultiWorkerMirrored, rescaled")
    )
    return rows


def _zero_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    click.echo("measuring a training step of the GPT with shared state ...")
    step = groups["GPT step with ZeRO, np=2"] = under_unidist("benchmarks.zero_step", 2, repetitions)
    rows = []
    for name, wanted, peer, faster in (
        ("zero=1", 1.03, "ZeroRedundancyOptimizer", 1.3),
        ("zero=2", 1.03, "ZeroRedundancyOptimizer", 1.3),
        ("zero=3", 1.35, "FSDP2", 1.8),
        ("zero=3:shared=false", 1.35, "FSDP2", 1.8),
    ):
        ours, alone = step[name], step["no communication"]
        detail = f"{duration(ours)}, no communication {duration(alone)}"
        rows.append(Row(f"GPT step, np=2, {name}, of no communication", ours / alone, "x", "at most", wanted, detail))
        rows.append(_faster(f"GPT step, np=2, {name}, of {peer}", ours, step[peer], faster, peer))
    return rows


def _tensor_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    click.echo("measuring a training step with cut layers ...")
    step = groups["12 blocks that are cut, np=2"] = under_unidist("benchmarks.tensor_step", 2, repetitions)
    ours, alone, peer = step["tensor=2"], step["one process"], step["DTensor over gloo"]
    detail = f"{duration(ours)}, one process {duration(alone)}"
    return [
        Row("12 blocks, tensor=2, of one process", ours / alone, "x", "at most", 0.65, detail),
        _faster("12 blocks, tensor=2, of DTensor over gloo", ours, peer, 1.3, "DTensor"),
    ]


def _pipeline_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    click.echo("measuring a training step in a pipeline ...")
    step = groups["12 blocks in a pipeline, np=2"] = under_unidist("benchmarks.pipeline_step", 2, repetitions)
    alone, peer = step["one process"], step["PyTorch 1F1B over gloo"]
    rows = []
    for name in ("1f1b", "zb-h1"):
        what, ours = f"12 blocks, pipeline=2:schedule={name}, of", step[name]
        detail = f"{duration(ours)}, one process {duration(alone)}"
        rows.append(Row(f"{what} one process", ours / alone, "x", "at most", 0.68, detail))
        rows.append(_faster(f"{what} PyTorch 1F1B over gloo", ours, peer, 1.3, "PyTorch"))
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
@click.option("--output-dir", type=click.Path(path_type=Path), default=ROOT / "out", show_default="out/")
def main(repetitions: int, output_dir: Path) -> None:
    """Measure unidist beside its peers. Takes some minutes; wants a quiet machine."""
    groups: dict[str, dict[str, float]] = {}
    rows: list[Row] = []
    for num_proc in (2, 4):
        title = f"all-reduce, np={num_proc}"
        click.echo(f"measuring {title} ...")
        medians = under_unidist("benchmarks.allreduce", num_proc, repetitions)
        rows += _allreduce_rows(medians, num_proc)
        groups[f"{title}: 100 MB"] = {name: value for name, value in medians.items() if name.startswith("100 MB")}
        groups[f"{title}: 4 KB"] = {name: value for name, value in medians.items() if name.startswith("4 KB")}
    click.echo("measuring a training step of the GPT ...")
    step = groups["GPT step, np=2"] = under_unidist("benchmarks.gpt_step", 2, repetitions)
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
    rows += _zero_rows(groups, repetitions)
    rows += _pipeline_rows(groups, repetitions)
    rows += _tensor_rows(groups, repetitions)
    if importlib.util.find_spec("horovod") is None:
        click.echo("Horovod is not installed (unidist build horovod): what is measured beside it is left out")
    else:
        rows += _horovod_rows(groups, repetitions)
        rows += _keras_rows(groups, repetitions)
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
