"""`unidist plan`: how to divide the training of a model over ranks, and how long a step will take."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unidist.errors import ConfigurationError
from unidist.runtime.plugin_manager import PluginManager
from unidist.settings.environment import Settings
from unidist_launch.options.numbers import Real
from unidist_planner.model_options import (
    BYTES,
    FACTORS,
    POSITIVE,
    SECONDS,
    SIZES,
    Number,
    read_number,
    transformer,
    transformer_options,
)

if TYPE_CHECKING:
    from unidist.cost_model.cluster import Cluster
    from unidist.cost_model.collectives import Link
    from unidist.cost_model.work import ModelWork
    from unidist_planner.step_time.bench_links import BenchLinks
    from unidist_planner.step_time.fit import Fit
    from unidist_planner.step_time.measurements import Measurements


class _LinkType(click.ParamType):  # type: ignore[type-arg]  # generic in some versions of click only
    """Latency and bandwidth: `5us:250GB`."""

    name = "latency:bandwidth"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Link:
        from unidist.cost_model.collectives import Link

        if isinstance(value, Link):
            return value
        first, colon, second = str(value).partition(":")
        latency, bandwidth = read_number(first, SECONDS), read_number(second.removesuffix("/s"), BYTES)
        if not colon or latency is None or bandwidth is None:
            self.fail(f"{value!r} is no latency and bandwidth, with a colon between: 5us:250GB", param, ctx)
        return Link(latency, bandwidth)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--model",
    metavar="SOURCE",
    help="module:function or file.py:function that returns the model and inputs for one pass.",
)
@transformer_options
@click.option("--batch", type=POSITIVE, required=True, help="Samples of one update, on all ranks together.")
@click.option("--ranks", "-np", type=POSITIVE, required=True, help="Number of processes.")
@click.option("--ranks-per-host", type=POSITIVE, help="Default: all on one host.")
@click.option("--memory", type=Number("size", BYTES), help="What a rank has: 80GB, 16GiB. Default: no limit.")
@click.option(
    "--flops", type=Number("number", FACTORS), help="Operations per second of a rank in matrix products: 250T."
)
@click.option("--memory-bandwidth", type=Number("size", BYTES), help="Bytes per second of a rank: 2TB.")
@click.option("--inside", type=_LinkType(), help="Between ranks of a host: 5us:250GB.")
@click.option("--between", type=_LinkType(), help="Between hosts; the bandwidth of a host, all its ranks together.")
@click.option(
    "--overlap",
    type=Real(0, 1),
    default=1.0,
    show_default=True,
    help="Part of an exchange that can go on behind arithmetic.",
)
@click.option(
    "--attention-flops", type=Number("number", FACTORS), help="Likewise in attention's products. Default: as --flops."
)
@click.option(
    "--product-overhead", type=Number("time", SECONDS), help="What each matrix product takes in addition: 8us."
)
@click.option(
    "--efficiency",
    type=Real(0, 1, min_open=True),
    help="Part of the bandwidth between hosts that collectives reach. Default: what --bench says, else 0.8.",
)
@click.option(
    "--collectives",
    type=click.Choice(["ring", "fastest"]),
    default="ring",
    show_default=True,
    help="Gathers over hosts go around a ring of all ranks (NCCL), or by the fastest of unidist's algorithms.",
)
@click.option(
    "--bench",
    "benches",
    type=click.Path(path_type=Path),
    multiple=True,
    help="File of unidist bench --json, of ranks on one host or on several: what its links reach. Repeatable.",
)
@click.option(
    "--fit",
    "runs",
    type=click.Path(path_type=Path),
    help="JSON of measured runs: correct the machines' figures by them.",
)
@click.option(
    "--measured", type=click.Path(path_type=Path), help="File of unidist doctor --measure: what is not given above."
)
@click.option(
    "--strategy", metavar="LINE", default="", help="Stays in every plan: precision=bf16,activations=recompute."
)
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="Default: fp32.")
@click.option("--optimizer", default="adam", show_default=True, help="sgd, momentum, adam, ...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(*, batch: int, ranks: int, strategy: str, precision: Any, optimizer: str, as_json: bool, **given: Any) -> int:
    """Propose how to divide training over ranks: the five fastest divisions that fit, and what bounds each.

    Sizes of pipeline, data and tensor axes, stages of ZeRO, micro-batches and recomputation are tried together. The
    time of a step comes from the model's arithmetic, the simulated schedule of the pipeline, and latency and bandwidth
    of the links; nothing is started.

    \b
      unidist plan --layers 96 --hidden 12288 --heads 96 --vocab 51200 --sequence 2048 --batch 1536 \\
          -np 1024 --ranks-per-host 8 --precision fp16 --memory 80GB --flops 250T --memory-bandwidth 2TB \\
          --inside 5us:250GB --between 10us:200GB
      unidist plan --model train.py:make_model --batch 512 -np 8 --flops 250T --inside 5us:250GB
      unidist doctor --measure here.json && unidist plan --measured here.json -np 2 --batch 16 --layers 12 ...

    Exits with 1 when nothing fits.
    """
    from unidist.cost_model.step_interface import SearchProblem
    from unidist_planner import plan_output
    from unidist_planner.step_time.search import search

    manager = PluginManager(Settings.read().disabled_plugins).load()
    work = _work(given, manager, batch, optimizer, precision)
    problem = SearchProblem(work, _cluster(given, ranks), ranks, manager)
    fit: Fit | None = None
    if given["runs"] is not None:
        from unidist_planner.step_time.fit import fitted, read_runs

        fit = fitted(read_runs(given["runs"], batch), problem)
        problem = replace(problem, cluster=fit.cluster)
    with _without_collector():
        found = search(problem, strategy)
    script = _script(given["model"])
    if as_json:
        click.echo(plan_output.as_json(found, problem, script=script, fit=fit))
    else:
        plan_output.show(found, problem, script=script, fit=fit)
    return int(not found.best)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Leave out garbage collections, a sixth of a search: of all it makes, nothing refers to itself."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _script(model: str | None) -> str:
    """Return the script of the command that starts the plan: the file of --model, if it is one."""
    source = (model or "").rpartition(":")[0]
    return source if source.endswith(".py") else "train.py"


def _work(given: dict[str, Any], manager: PluginManager, batch: int, optimizer: str, precision: Any) -> ModelWork:
    """Return what is trained: a transformer by its sizes, or a script's model, which is counted.

    Raises:
        ConfigurationError: neither is given, or both, or the model cannot be counted.
    """
    from unidist_planner.step_time.transformer import TransformerWork

    source = given["model"]
    if source is None:
        sizes = transformer(given)
        if sizes is None:
            raise ConfigurationError(
                "what is trained? Give --layers, --hidden, --vocab and --sequence of a transformer, or --model"
            )
        return TransformerWork(sizes, batch, optimizer, precision)
    for name in SIZES:
        if given[name] is not None:
            raise ConfigurationError(
                f"--model and --{name.replace('_', '-')} both say what the model is; give one of them"
            )
    from unidist_planner.memory.source import model_from
    from unidist_planner.step_time.counted import work_from

    found = model_from(source, manager.frameworks)
    return work_from(found, batch, optimizer=optimizer, precision=precision, heads=given["heads"])


def _cluster(given: dict[str, Any], ranks: int) -> Cluster:
    """Return the machines: what is given, else what was measured.

    Raises:
        ConfigurationError: something is neither given nor measured; names it.
    """
    from unidist.cost_model.cluster import Cluster
    from unidist.cost_model.efficiency import Efficiency
    from unidist_planner.step_time.measurements import read

    measured: Measurements | None = None if given["measured"] is None else read(given["measured"])
    per_host = min(ranks, given["ranks_per_host"] or ranks)
    flops, inside, between = given["flops"], given["inside"], given["between"]
    messages = None
    reached = {} if given["efficiency"] is None else {"efficiency_between": Efficiency.constant(given["efficiency"])}
    for near, found in _benches(given["benches"], inside, between).items():
        if near:
            inside, reached["efficiency_inside"] = found.link, found.efficiency
        else:
            between = found.link
            reached.setdefault("efficiency_between", found.efficiency)
    if measured is not None:
        flops = flops or measured.flops
        if inside is None:
            inside, messages = measured.collectives, measured.messages
    missing = []
    if flops is None:
        missing.append("--flops")
    if inside is None and per_host > 1:
        missing.append("--inside")
    if between is None and per_host < ranks:
        missing.append("--between")
    if missing:
        raise ConfigurationError(
            f"how fast are the machines? Give {', '.join(missing)}"
            + ("" if measured else "; `unidist doctor --measure FILE` measures this one, for --measured FILE")
        )
    any_link = inside or between
    return Cluster(
        flops=flops,  # pyright: ignore[reportArgumentType]  # None was refused above
        ranks_per_host=per_host,
        inside=inside or any_link,  # pyright: ignore[reportArgumentType]  # None where no two ranks are on a host
        between=between or any_link,  # pyright: ignore[reportArgumentType]  # None on one host
        messages=messages,
        memory_bytes=given["memory"] or (measured.memory_bytes if measured else None),
        memory_bandwidth=given["memory_bandwidth"] or (measured.memory_bandwidth if measured else None),
        overlap=given["overlap"],
        attention_flops=given["attention_flops"],
        product_overhead=given["product_overhead"] or 0.0,
        rings=given["collectives"] == "ring",
        **reached,
    )


def _benches(paths: Sequence[Path], inside: Link | None, between: Link | None) -> dict[bool, BenchLinks]:
    """Return what files of `unidist bench` say, by whether their ranks were on one host; given links are their rates.

    Raises:
        ConfigurationError: two files are about the same kind of link, or one cannot be used.
    """
    if not paths:
        return {}
    from unidist_planner.step_time.bench_links import bench_links

    found: dict[bool, BenchLinks] = {}
    for path in paths:
        one = bench_links(path, inside=inside, between=between)
        if one.is_inside in found:
            where = "on one host" if one.is_inside else "on several hosts"
            raise ConfigurationError(f"--bench {path}: there is another file of ranks {where}; give one of them")
        found[one.is_inside] = one
    return found
