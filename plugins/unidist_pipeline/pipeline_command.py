"""`unidist pipeline`: look at schedules before a job uses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unidist_launch.options.numbers import Real, Whole
from unidist_pipeline.schedules.registration import ScheduleSpec

if TYPE_CHECKING:
    from unidist_pipeline.schedules.model import Schedule
    from unidist_pipeline.simulation.costs import Costs

_HELP = {"help_option_names": ["-h", "--help"]}


def _per_stage(ctx: click.Context, param: click.Parameter, value: str | None) -> float | tuple[float, ...] | None:
    """Convert a number, or several with commas between: one for each stage."""
    if value is None:
        return None
    try:
        numbers = tuple(float(word) for word in value.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is not a number, nor one for each stage with commas between.", ctx, param
        ) from None
    return numbers[0] if len(numbers) == 1 else numbers


@click.group(context_settings=_HELP)
def pipeline() -> None:
    """Schedules of pipeline parallelism: list them, draw them, simulate them."""


@pipeline.command("list", context_settings=_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_schedules(as_json: bool) -> None:
    """List the schedules that are registered, and by which plugin."""
    from rich.console import Console
    from rich.table import Table

    registry = _plugins().registry(ScheduleSpec)
    found = [
        {
            "name": spec.name,
            "stages_per_rank": spec.stages_per_rank,
            "plugin": registry.origin_of(spec.name),
            "summary": spec.summary,
        }
        for spec in registry
    ]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    table = Table("schedule", "stages per rank", "plugin", "")
    for row in found:
        table.add_row(*map(str, row.values()))
    Console().print(table)


@pipeline.command("show", context_settings=_HELP)
@click.option("--schedule", "name", help="Name of a schedule; `unidist pipeline list` shows them.")
@click.option("--file", "source", type=click.Path(path_type=Path), help="Read a schedule from a file instead.")
@click.option(
    "--stages", "num_ranks", type=Whole(), help="Ranks of the pipeline, each with one stage or --virtual ones."
)
@click.option("--microbatches", "num_microbatches", type=Whole(), help="Pieces of the batch.")
@click.option("--virtual", "stages_per_rank", type=Whole(), help="Stages on each rank. Default: the schedule's own.")
@click.option(
    "--forward", metavar="TIME", callback=_per_stage, default="1", show_default=True, help="Time of a forward."
)
@click.option(
    "--backward", metavar="TIME", callback=_per_stage, default="2", show_default=True, help="Time of a full backward."
)
@click.option(
    "--backward-weight", metavar="TIME", callback=_per_stage, help="Part of it for the weights. Default: half."
)
@click.option(
    "--message", type=Real(), metavar="TIME", default=0.0, show_default=True, help="Time that a message is under way."
)
@click.option("--limit", type=Real(), metavar="N", help="Micro-batches that a rank may hold, for searched schedules.")
@click.option(
    "--kept",
    type=Real(),
    metavar="PART",
    default=1.0,
    show_default=True,
    help="Part of a micro-batch's memory that is held between the two parts of a backward.",
)
@click.option(
    "--reduce",
    metavar="TIME",
    callback=_per_stage,
    default="0",
    show_default=True,
    help="Time to exchange a stage's gradients.",
)
@click.option(
    "--waits",
    type=click.Choice(("asynchronous", "buffered", "rendezvous")),
    default="asynchronous",
    show_default=True,
    help="Who waits at a message: nobody, the receiver, or both.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Also draw it into a file (png, pdf, svg).")
@click.option("--save", type=click.Path(path_type=Path), help="Write the schedule to a file (yaml, json).")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON, and no chart.")
def show(
    name: str | None,
    source: Path | None,
    num_ranks: int | None,
    num_microbatches: int | None,
    stages_per_rank: int | None,
    out: Path | None,
    save: Path | None,
    waits: str,
    as_json: bool,
    limit: float | None,
    kept: float,
    **costs: Any,
) -> None:
    """Draw a schedule and say how long it takes and what it holds in memory.

    Times have any unit; a list with commas gives each stage its own, as in --forward 1,1,2,1.
    """
    from rich.console import Console

    from unidist_pipeline.schedules.execution_model import MessageMode
    from unidist_pipeline.schedules.files import write_schedule
    from unidist_pipeline.simulation.costs import Costs
    from unidist_pipeline.simulation.drawing import Chart, figures, headline
    from unidist_pipeline.simulation.simulator import simulate

    given = Costs(**costs, kept_for_weight=kept)
    schedule = _schedule(name, source, num_ranks, num_microbatches, stages_per_rank, given, limit)
    simulation = simulate(schedule, given, messages=MessageMode(waits))
    if save is not None:
        write_schedule(schedule, save)
    if out is not None:
        from unidist_pipeline.simulation.plot import write_plot

        write_plot(simulation, out)
    if as_json:
        click.echo(json.dumps(figures(simulation), indent=2))
        return
    console = Console()
    console.print(headline(simulation), highlight=False)
    console.print(Chart(simulation))


def _schedule(
    name: str | None,
    source: Path | None,
    num_ranks: int | None,
    num_microbatches: int | None,
    stages_per_rank: int | None,
    costs: Costs,
    limit: float | None,
) -> Schedule:
    if (name is None) is (source is None):
        raise click.UsageError("give either --schedule or --file.")
    if source is not None:
        if any(size is not None for size in (num_ranks, num_microbatches, stages_per_rank, limit)):
            raise click.UsageError(
                "--file has the sizes in it; leave --stages, --microbatches, --virtual and --limit away."
            )
        from unidist_pipeline.schedules.files import read_schedule

        return read_schedule(source)
    if num_ranks is None or num_microbatches is None:
        raise click.UsageError("--schedule needs --stages and --microbatches.")
    from unidist_pipeline.schedules.catalog import build_schedule

    assert name is not None
    registry = _plugins().registry(ScheduleSpec)
    searched = name in registry and registry.get(name).searched
    return build_schedule(
        name,
        registry,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
        times=costs.mean_times(num_ranks) if searched else None,
        limit=limit,
    )


def _plugins() -> Any:
    from unidist.runtime.plugin_manager import PluginManager
    from unidist.settings.environment import Settings

    return PluginManager(Settings.read().disabled_plugins).load()
