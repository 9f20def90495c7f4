"""Measure unidist beside its peers: print a table, write it and a plot to out/; or compare two tables."""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

from benchmarks import hosts, launch_time, local_sgd, recovery, straggler
from benchmarks.compare import changes, described
from benchmarks.control_plane import growth
from benchmarks.jobs import ROOT, free_ports, under_horovodrun, under_unidist
from benchmarks.report import Row, combined, duration, read_rows, save, show


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
    for how, alone_how in (("loop", "loop"), ("tape", "loop"), ("fit", "fit")):
        ours, alone = step[f"{how}, unidist"], step[f"{alone_how}, no communication"]
        detail = f"{duration(ours)}, no communication {duration(alone)}"
        rows.append(Row(f"Keras step by {how}, np=2, of no communication", ours / alone, "x", "at most", 1.15, detail))
    for how in ("loop", "tape"):
        what, ours = f"Keras step by {how}, np=2, of Horovod's tape", step[f"{how}, unidist"]
        rows.append(_faster(what, ours, step["loop, Horovod"], 1.3, "Horovod"))
    ours, alone = step["loop, unidist"], step["loop, no communication"]
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


def _keras_zero_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    click.echo("measuring a training step in Keras with shared state ...")
    step = groups["Keras step with ZeRO, np=2"] = under_unidist("benchmarks.keras_zero_step", 2, repetitions)
    alone, data = step["no communication"], step["data"]
    rows = []
    for name, of_alone, of_data in (("zero=1", 1.15, 1.05), ("zero=2", 1.15, 1.05), ("zero=3", 1.6, 1.5)):
        what, ours = f"Keras step by loop, np=2, {name}, of", step[name]
        detail = f"{duration(ours)}, no communication {duration(alone)}"
        rows.append(Row(f"{what} no communication", ours / alone, "x", "at most", of_alone, detail))
        rows.append(
            Row(f"{what} data", ours / data, "x", "at most", of_data, f"{duration(ours)}, data {duration(data)}")
        )
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


def _context_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    click.echo("measuring a training step on a divided sequence ...")
    count = 3 if repetitions < 40 else 7  # a step takes seconds
    step = groups["8192 tokens that are divided, np=2"] = under_unidist("benchmarks.context_step", 2, count, "8192")
    ideal, peer = step["every rank alone"] / 2, step["PyTorch's ring over gloo"]
    ours = step["ring"]
    detail = f"{duration(ours)}, half {duration(ideal)}"
    rows = [
        Row("8192 tokens, context=2, of half a step that each rank makes", ours / ideal, "x", "at most", 1.15, detail),
        _faster("8192 tokens, context=2, of PyTorch's ring over gloo", ours, peer, 1.0, "PyTorch"),
    ]
    four = groups["8192 tokens that are divided, np=4"] = under_unidist("benchmarks.context_step", 4, 0, "8192")
    for size, found in ((2, step), (4, four)):
        for what in ("saved", "peak"):
            ours, whole = found[f"ring, {what} MB"], step[f"one process, {what} MB"]
            title = f"activations, {what}, context={size}, of 1/{size} of one process"
            detail = f"{ours:.1f} MB, one process {whole:.1f} MB"
            rows.append(Row(title, ours * size / whole, "x", "at most", 1.1, detail))
    return rows


def _expert_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    click.echo("measuring a training step with divided experts ...")
    step = groups["4 layers of 8 experts, np=2"] = under_unidist("benchmarks.expert_step", 2, repetitions)
    ours, ideal, peer = step["expert=2"], step["dense loop"] / 2, step["all-to-all over gloo"]
    detail = f"{duration(ours)}, half of the loop {duration(ideal)}, of the layer {duration(step['one process'] / 2)}"
    return [
        Row("4 layers of 8 experts, expert=2, of half of the dense loop", ours / ideal, "x", "at most", 1.15, detail),
        _faster("4 layers of 8 experts, expert=2, of all-to-all over gloo", ours, peer, 1.0, "all-to-all"),
    ]


def _pipeline_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    click.echo("measuring a training step in a pipeline ...")
    step = groups["12 blocks in a pipeline, np=2"] = under_unidist("benchmarks.pipeline_step", 2, repetitions)
    alone = step["one process"]
    rows = []
    for count in (8, 4):
        half, peer = step[f"half the blocks, {count}"], step[f"PyTorch 1F1B over gloo, {count}"]
        for name in ("1f1b", "zb-h1"):
            what, ours = f"12 blocks, pipeline=2:schedule={name}:microbatches={count}, of", step[f"{name}, {count}"]
            detail = f"{duration(ours)}, one process {duration(alone)}, half the blocks {duration(half)}"
            rows.append(Row(f"{what} one process", ours / alone, "x", "at most", 0.66, detail))
            rows.append(_faster(f"{what} PyTorch 1F1B over gloo", ours, peer, 1.3, "PyTorch"))
    return rows


def _faster(what: str, ours: float, theirs: float, target: float, peer: str) -> Row:
    return Row(what, theirs / ours, "x", "at least", target, f"{duration(ours)}, {peer} {duration(theirs)}")


def _allreduce_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    rows = []
    for num_proc in (2, 4):
        where = f"all-reduce, np={num_proc}"
        click.echo(f"measuring {where} ...")
        medians = under_unidist("benchmarks.allreduce", num_proc, repetitions)
        wanted = (
            {"engine": 4.0, "ordinary": 1.8, "named": 2.0, "world": 5.0}
            if num_proc == 2
            else dict.fromkeys(("engine", "ordinary", "named", "world"), 1.0)
        )
        for size, what, key in (
            ("100 MB", "engine memory", "engine"),
            ("100 MB", "ordinary memory", "ordinary"),
            ("4 KB", "named", "named"),
            ("4 KB", "world()", "world"),
        ):
            ours, theirs = medians[f"{size}, {what}"], medians[f"{size}, gloo"]
            rows.append(_faster(f"{where}: {size}, {what}", ours, theirs, wanted[key], "gloo"))
        for size in ("100 MB", "4 KB"):
            groups[f"{where}: {size}"] = {name: value for name, value in medians.items() if name.startswith(size)}
    return rows


def _tcp_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    click.echo("measuring the engine tcp ...")
    found = under_unidist("benchmarks.allreduce", 2, repetitions, options=("--engine", "tcp"))
    groups["over TCP on one host, np=2: 100 MB"] = {name: found[name] for name in found if name.startswith("100 MB")}
    groups["over TCP on one host, np=2: 4 KB"] = {name: found[name] for name in found if name.startswith("4 KB")}
    return [
        _faster(f"tcp, np=2: {size}, {what}", found[f"{size}, {what}"], found[f"{size}, gloo"], wanted, "gloo")
        for size, what, wanted in (("100 MB", "ordinary memory", 1.5), ("4 KB", "named", 3.0), ("4 KB", "world()", 3.0))
    ] + _tls_rows(groups, repetitions)


def _tls_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    """What encryption costs; measured in one run, with both groups of ranks in the same processes."""
    found = under_unidist("benchmarks.tls", 2, repetitions, options=("--engine", "tcp"))
    groups["encrypted, over TCP on one host, np=2"] = found
    return [
        Row(
            f"tcp, np=2: {size} with --tls, of plain",
            found[f"{size}, --tls"] / found[f"{size}, plain"],
            "x",
            "at most",
            wanted,
            f"{duration(found[f'{size}, --tls'])}, plain {duration(found[f'{size}, plain'])}",
        )
        for size, wanted in (("100 MB", 5.0), ("4 KB", 2.0))
    ]


def _hosts_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    if reason := hosts.why_not():
        click.echo(f"hosts: left out: {reason}")
        return []
    click.echo("measuring between two hosts ...")
    rows = []
    for size, wanted in (("100MB", 2.0), ("4K", 3.0)):
        ours, theirs = hosts.measure(size)
        rows.append(_faster(f"all-reduce, 8 ranks on 2 hosts: {size}", ours, theirs, wanted, "gloo"))
        groups[f"8 ranks on 2 hosts: {size}"] = {"unidist": ours, "gloo": theirs}
    return rows


def _torch_backend_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    click.echo("measuring the backend of torch.distributed ...")
    found = under_unidist("benchmarks.torch_backend", 2, repetitions)
    groups["torch.distributed, np=2"] = {name: value for name, value in found.items() if "B, " not in name}
    rows = [
        _faster(f"dist.all_reduce, np=2: {size}", found[f"{size}, unidist"], found[f"{size}, gloo"], wanted, "gloo")
        for size, wanted in (("100 MB", 3.0), ("4 KB", 5.0))
    ]
    for name, wanted in (("DDP", 0.88), ("FSDP2", 0.65)):
        ours, theirs = found[f"{name}, unidist"], found[f"{name}, gloo"]
        floor = duration(found[f"{name}, no exchange"])
        detail = f"{duration(ours)}, over gloo {duration(theirs)}, no exchange {floor}"
        rows.append(Row(f"GPT step, np=2, {name} over unidist, of gloo", ours / theirs, "x", "at most", wanted, detail))
    return rows


def _trainer_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    rows = []
    for library, name in (("lightning", "Lightning"), ("transformers", "Hugging Face")):
        if importlib.util.find_spec(library) is None:
            click.echo(f"trainers: {name} is left out, it is not installed (make test-integrations has it)")
            continue
        click.echo(f"measuring a training step through {name} ...")
        step = groups[f"GPT step through {name}, np=2"] = under_unidist("benchmarks.trainers", 2, repetitions, library)
        ours = step[f"{name}, unidist"]
        for peer, wanted in (("own loop", 1.03), (f"{name}, DDP over gloo", 0.9)):
            detail = f"{duration(ours)}, {peer} {duration(step[peer])}"
            rows.append(Row(f"GPT step, np=2, {name}, of {peer}", ours / step[peer], "x", "at most", wanted, detail))
    return rows


def _gpt_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    click.echo("measuring a training step of the GPT ...")
    step = groups["GPT step, np=2"] = under_unidist("benchmarks.gpt_step", 2, repetitions)
    rows = []
    for peer, target in (("no communication", 1.08), ("DDP over gloo", 0.95)):
        detail = f"{duration(step['unidist'])}, {peer} {duration(step[peer])}"
        ratio = step["unidist"] / step[peer]
        rows.append(Row(f"GPT training step, np=2, of {peer}", ratio, "x", "at most", target, detail))
    return rows


def _compiled_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    click.echo("measuring a compiled training step of the GPT ...")
    step = groups["compiled GPT step, np=2"] = under_unidist("benchmarks.compiled_step", 2, repetitions)
    rows = []
    for backend in ("aot_eager", "inductor"):
        ours = step[f"{backend}, unidist"]
        for peer, target in (("no communication", 1.05), ("DDP over gloo", 0.95)):
            theirs = step[f"{backend}, {peer}"]
            detail = f"{duration(ours)}, {peer} {duration(theirs)}"
            rows.append(Row(f"GPT step by {backend}, np=2, of {peer}", ours / theirs, "x", "at most", target, detail))
    return rows


def _jax_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    if importlib.util.find_spec("jax") is None:
        click.echo("jax: left out, JAX is not installed")
        return []
    click.echo("measuring in JAX ...")
    found = groups["in JAX, np=2"] = under_unidist("benchmarks.jax_step", 2, repetitions, str(free_ports(1)[0]))
    ours, alone = found["GPT step, unidist"], found["GPT step, no communication"]
    detail = f"{duration(ours)}, no communication {duration(alone)}"
    return [
        _faster("JAX, all-reduce in jit, np=2: 25 MB", found["25 MB, unidist"], found["25 MB, psum"], 10.0, "psum"),
        Row(
            "JAX, all-reduce in jit, np=2: 16 B",
            1e6 * found["16 B, unidist"],
            "us",
            "at most",
            100.0,
            "psum " + duration(found["16 B, psum"]),
        ),
        Row("JAX, GPT step, np=2, of no communication", ours / alone, "x", "at most", 1.08, detail),
        _faster("JAX, GPT step, np=2, of pmean over gloo", ours, found["GPT step, pmean"], 1.0, "pmean"),
    ]


def _launch_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    click.echo("measuring the launchers ...")
    launch = groups["launching np=2"] = launch_time.measure(max(3, repetitions // 3))
    ours, theirs = launch["unidist launch"], launch["torchrun"]
    detail = f"{duration(ours)}, torchrun {duration(theirs)}"
    helping = launch["unidist launch --help"]
    return [
        Row("unidist launch of a trivial script", ours / theirs, "x", "at most", 0.25, detail),
        Row("unidist launch --help", helping, "s", "at most", 0.25, duration(helping)),
    ]


def _defence_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    click.echo("measuring what --verify and the watch for deadlocks cost ...")
    found = groups["defences, np=2"] = under_unidist("benchmarks.defences", 2, max(3, repetitions // 3))
    rows = []
    for strategy in ("data", "zero=3", "tensor=2", "pipeline=2"):
        with_it, without = (found[f"{strategy}: first 10 steps, {name}"] for name in ("both", "no --verify"))
        detail = f"{duration(with_it)}, without {duration(without)}"
        rows.append(Row(f"--verify, {strategy}: added to 10 steps", with_it - without, "s", "at most", 1.0, detail))
        with_it, without = (found[f"{strategy}: later step, {name}"] for name in ("both", "neither"))
        detail = f"{duration(with_it)}, without {duration(without)}"
        rows.append(Row(f"defences, {strategy}: later step, of none", with_it / without, "x", "at most", 1.03, detail))
    with_it, without = (found[f"data: later step, {name}"] for name in ("replay=1", "neither"))
    detail = f"{duration(with_it)}, without {duration(without)}: every 1000 steps {(with_it / without - 1) / 10:.2f} %"
    rows.append(Row("--verify replay=1, data: later step, of none", with_it / without, "x", "at most", 3.2, detail))
    with_it, without = (found[f"4 KB, {name}"] for name in ("both", "neither"))
    detail = f"{duration(with_it)}, without {duration(without)}"
    rows.append(Row("defences: all-reduce of 4 KB by name, of none", with_it / without, "x", "at most", 1.05, detail))
    return rows


def _recovery_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    click.echo("killing ranks ...")
    peers = [layer for layer in ("horovod", "torchrun") if layer != "horovod" or _has_horovod()]
    layers = ["unidist", recovery.SPARE, *peers]
    found = recovery.measure(layers, max(3, repetitions // 7))
    medians = {layer: recovery.median(found[layer]) for layer in layers}
    seconds = {layer: min(medians[layer].next_step, recovery.GIVE_UP_SEC) for layer in layers}
    groups["from kill -9 to the next step, np=3"] = seconds
    what = "kill -9 of one of 3 ranks"
    ours = medians["unidist"].described()
    rows = [Row(f"{what}, next step after", seconds["unidist"], "s", "at most", 1.0, ours)]
    whole = medians[recovery.SPARE].whole
    rows.append(
        Row(f"{what}, all ranks again with --spares 1", whole, "s", "at most", 0.5, medians[recovery.SPARE].described())
    )
    for peer in peers:
        ratio = seconds[peer] / seconds["unidist"]
        detail = f"{peer} {medians[peer].described()}"
        rows.append(Row(f"{what}, next step, of {peer}", ratio, "x", "at least", 1.0, detail))
    return rows


def _local_sgd_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    click.echo("training with DiLoCo ...")
    names = {"data": local_sgd.DATA, "DiLoCo": local_sgd.DILOCO}
    module, steps = "benchmarks.local_sgd", local_sgd.LOSS_STEPS
    losses = {name: under_unidist(module, 2, steps, strategy)["loss"] for name, strategy in names.items()}
    detail = f"DiLoCo {losses['DiLoCo']:.4f}, data {losses['data']:.4f}"
    what = f"DiLoCo, np=2: loss after {steps} updates, of data"
    rows = [Row(what, losses["DiLoCo"] / losses["data"], "x", "at most", 1.02, detail)]
    if reason := local_sgd.why_not():
        click.echo(f"slow link: left out: {reason}")
        return rows
    click.echo("training over a slow link ...")
    link = {name: local_sgd.over_slow_link(strategy, local_sgd.LINK_STEPS) for name, strategy in names.items()}
    seconds = {name: found["seconds"] for name, found in link.items()}
    groups["update over 100 Mbit/s and 50 ms, np=2"] = seconds
    sent = {name: found["bytes"] / local_sgd.LINK_STEPS for name, found in link.items()}
    detail = f"DiLoCo {sent['DiLoCo'] / 1e3:.2f} kB an update, data {sent['data'] / 1e3:.2f} kB"
    what = "DiLoCo over 100 Mbit/s and 50 ms, np=2"
    rows.append(Row(f"{what}: bytes, of data", sent["DiLoCo"] / sent["data"], "x", "at most", 0.02, detail))
    detail = f"DiLoCo {duration(seconds['DiLoCo'])}, data {duration(seconds['data'])}"
    rows.append(Row(f"{what}: time, of data", seconds["DiLoCo"] / seconds["data"], "x", "at most", 0.3, detail))
    return rows


def _parameter_server_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    click.echo("measuring parameter servers ...")
    found = groups["push and fetch of 38 MB, np=2"] = under_unidist(
        "benchmarks.parameter_server", 2, repetitions, "store"
    )
    rows = []
    for mode, name in itertools.product(("async", "sync"), ("SGD", "AdamW")):
        ours, what = found[f"{mode}, {name}"], f"{mode}, np=2: push and fetch of 38 MB, {name}, of an all-reduce"
        for peer, suffix, wanted in (("all-reduce", "", 1.5), (f"all-reduce and {name}", " and a step", 1.0)):
            detail = f"{duration(ours)}, {peer} {duration(found[peer])}"
            rows.append(Row(what + suffix, ours / found[peer], "x", "at most", wanted, detail))
    step = groups["GPT steps with parameter servers, np=2"] = under_unidist(
        "benchmarks.parameter_server", 2, repetitions, "gpt"
    )
    for model, mode in itertools.product(("char GPT", "GPT"), ("async", "sync")):
        ours, data = step[f"{model}, parameter_server={mode}"], step[f"{model}, data"]
        detail = f"{duration(ours)}, data {duration(data)}"
        rows.append(Row(f"{mode}, np=2: step of the {model}, of data", ours / data, "x", "at most", 1.0, detail))
    return rows


def _straggler_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    click.echo("slowing one of three workers down ...")
    rows = []
    lines = {"data": "data", "sync": "parameter_server=sync", "async": "parameter_server=async"}
    lines["async, 1 server"] = "parameter_server=async:servers=1"
    for name, line in lines.items():
        found = groups[f"steps/s with a straggler, {name}, np=3"] = under_unidist(
            "benchmarks.straggler", straggler.WORKERS, 10 * repetitions, line, options=("--strategy", line)
        )
        kept = found["fast, slow"] / found["fast, equal"]
        detail = f"{found['fast, slow']:.1f} steps/s, with all as fast {found['fast, equal']:.1f}"
        what = f"one of 3 workers at half speed, {name}: rate that the others keep"
        rows.append(
            Row(what, kept, "x", "at least", 0.97, detail)
            if "async" in name
            else Row(what, kept, "x", "at most", 0.7, detail)
        )
    if importlib.util.find_spec("tensorflow") is None:
        click.echo("straggler: TensorFlow is left out, it is not installed")
        return rows
    theirs = straggler.under_tensorflow(float(repetitions))
    ours = groups["steps/s with a straggler, async, np=3"]
    detail = f"of all workers: {ours['all, slow']:.1f} of {ours['all, equal']:.1f} steps/s, "
    detail += f"TensorFlow {theirs['slow']:.1f} of {theirs['equal']:.1f}"
    ratio = ours["all, slow"] / ours["all, equal"] / (theirs["slow"] / theirs["equal"])
    what = "one of 3 workers at half speed, async: rate that all keep, of TensorFlow's ParameterServerStrategy"
    return [*rows, Row(what, ratio, "x", "at least", 1.0, detail)]


def _data_service_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    rows = []
    peers = {
        "torch": ("DataLoader, num_workers=1",),
        "tensorflow": ("tf.data's service, 1 worker", "tf.data, decoding in a thread"),
    }
    for framework, beside in peers.items():
        if importlib.util.find_spec(framework) is None:
            click.echo(f"data-service: {framework} is left out, it is not installed")
            continue
        click.echo(f"reading data with {framework} ...")
        options = ("--data-workers", "1")
        found = under_unidist("benchmarks.data_service", 1, max(3, repetitions // 3), framework, options=options)
        groups[f"two epochs with a slow decoder, {framework}"] = found
        ours, ready = found["--data-workers 1"], found["decoded before"]
        detail = f"{duration(ours)}, decoded before {duration(ready)}"
        what = f"two epochs, {framework}, --data-workers 1"
        rows += [
            _faster(f"{what}, of decoding in the loop", ours, found["decoding in the loop"], 1.5, "in the loop"),
            *(_faster(f"{what}, of {peer}", ours, found[peer], 0.95, peer) for peer in beside),
            Row(f"{what}, of no decoding", ours / ready, "x", "at most", 1.5, detail),
        ]
    return rows


def _control_plane_rows(groups: dict[str, dict[str, float]], repetitions: int) -> list[Row]:
    found = {}
    for number in (10, 500, 2000, 4000):
        click.echo(f"forming generations of {number} simulated workers ...")
        found[number] = growth.measure("elastic", number, repetitions=max(1, repetitions // 10))
    groups["control plane, elastic job"] = {
        f"{number} workers, {what}": getattr(figures, name)
        for number, figures in found.items()
        for what, name in (("formed", "met"), ("loss noticed", "noticed"), ("formed again", "reformed"))
    }
    ten, few, two_thousand, many = found.values()
    noticed = f"{duration(two_thousand.noticed)}, with 10 workers {duration(ten.noticed)}"
    rows = [
        Row("2000 workers: a generation forms", two_thousand.met, "s", "at most", 5.0, duration(two_thousand.met)),
        Row(
            "2000 workers: a loss is noticed, more than with 10",
            *(two_thousand.noticed - ten.noticed, "s", "at most", 1.0, noticed),
        ),
    ]
    for what, name in (
        ("launcher's processor time to form", "form_cpu"),
        ("workers' processor time to form", "worker_form_cpu"),
        ("launcher's processor time while all train", "steady_cpu"),
    ):
        one, other = getattr(many, name), getattr(few, name)
        detail = f"{duration(one)}, with 500 {duration(other)}"
        rows.append(Row(f"4000 workers: {what}, per worker, of 500", one / other, "x", "at most", 1.5, detail))
    detail = f"{many.memory / 1024:.1f} KiB, with 500 {few.memory / 1024:.1f} KiB"
    what = "4000 workers: launcher's memory, per worker, of 500"
    return [*rows, Row(what, many.memory / few.memory, "x", "at most", 1.2, detail)]


def _has_horovod() -> bool:
    return importlib.util.find_spec("horovod") is not None


_GROUPS: dict[str, tuple[Callable[[dict[str, dict[str, float]], int], list[Row]], bool]] = {
    # By name: the function, and whether it needs Horovod.
    "allreduce": (_allreduce_rows, False),
    "tcp": (_tcp_rows, False),
    "hosts": (_hosts_rows, False),
    "gpt": (_gpt_rows, False),
    "compiled": (_compiled_rows, False),
    "jax": (_jax_rows, False),
    "zero": (_zero_rows, False),
    "zero-keras": (_keras_zero_rows, False),
    "pipeline": (_pipeline_rows, False),
    "tensor": (_tensor_rows, False),
    "experts": (_expert_rows, False),
    "context": (_context_rows, False),
    "horovod": (_horovod_rows, True),
    "keras": (_keras_rows, True),
    "launch": (_launch_rows, False),
    "recovery": (_recovery_rows, False),
    "local-sgd": (_local_sgd_rows, False),
    "parameter-server": (_parameter_server_rows, False),
    "straggler": (_straggler_rows, False),
    "data-service": (_data_service_rows, False),
    "control-plane": (_control_plane_rows, False),
    "defences": (_defence_rows, False),
    "torch-backend": (_torch_backend_rows, False),
    "trainers": (_trainer_rows, False),
}


_SHORT = (
    "allreduce", "tcp", "gpt", "zero", "pipeline", "tensor", "experts", "horovod", "keras", "launch", "torch-backend",
)  # fmt: skip
"""What is measured by default; a round takes some five minutes. The others take minutes each, or need more set up."""

Medians = dict[str, dict[str, float]]


@click.command()
@click.option("--repetitions", default=7, show_default=True, help="Counted repetitions of each measurement in a round.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Whole measurements, at most.")
@click.option("--minutes", default=15.0, show_default=True, help="No round but the first begins that might end later.")
@click.option("--all", "is_whole", is_flag=True, help="Measure everything, as long as it takes: an hour or two.")
@click.option("--only", multiple=True, type=click.Choice(list(_GROUPS)), help="Measure this alone; may be repeated.")
@click.option("--output-dir", type=click.Path(path_type=Path), default=ROOT / "out", show_default="out/")
@click.option(
    "--compare",
    nargs=2,
    metavar="OLD NEW",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Measure nothing: compare two files bench.json. Exits with 1 if something became slower, beyond noise.",
)
def main(
    repetitions: int,
    rounds: int,
    minutes: float,
    is_whole: bool,
    only: tuple[str, ...],
    output_dir: Path,
    compare: tuple[Path, Path] | None,
) -> None:
    """Measure unidist beside its peers, for 15 minutes; wants a quiet machine."""
    if compare:
        old, new = map(read_rows, compare)
        click.echo("\n".join(described(old, new)))
        sys.exit(any(change.kind == "slower" for change in changes(old, new)))
    names = only or (tuple(_GROUPS) if is_whole else _SHORT)
    limit = float("inf") if is_whole else 60 * minutes
    began = time.monotonic()
    measured: list[tuple[Medians, list[Row]]] = []
    for number in range(1, rounds + 1):
        click.echo(f"round {number} of {rounds}")
        measured.append(_round(names, repetitions))
        passed = time.monotonic() - began
        if passed + passed / number > limit and number < rounds:
            click.echo(f"{number} rounds took {passed / 60:.0f} minutes: another would take longer than --minutes")
            break
    rows = combined([rows for _, rows in measured])
    show(rows)
    save(output_dir, _medians([medians for medians, _ in measured]), rows)
    click.echo(f"written: {', '.join(str(output_dir / f'bench.{kind}') for kind in ('json', 'md', 'png'))}")


def _round(names: tuple[str, ...], repetitions: int) -> tuple[Medians, list[Row]]:
    groups: Medians = {}
    rows: list[Row] = []
    for name in names:
        measure, needs_horovod = _GROUPS[name]
        if needs_horovod and not _has_horovod():
            click.echo(f"{name}: left out, Horovod is not installed (unidist build horovod)")
        else:
            began = time.monotonic()
            rows += measure(groups, repetitions)
            click.echo(f"{name}: took {time.monotonic() - began:.0f} s")
    return groups, rows


def _medians(rounds: list[Medians]) -> Medians:
    """Return the medians over the rounds."""
    return {
        title: {name: statistics.median(each[title][name] for each in rounds) for name in names}
        for title, names in rounds[0].items()
    }


if __name__ == "__main__":
    main()
