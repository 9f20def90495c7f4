"""What the planner, the estimator and the simulator say for each row of `figures.json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from typing_extensions import override

from benchmarks.published.systems import SYSTEMS
from unidist.cost_model import Cluster, Efficiency, Link, ModelFigures, ModelWork, PieceWork, SearchProblem, Workload
from unidist.registry import Registry
from unidist.runtime.plugin_manager import PluginManager
from unidist.strategy import StrategySpec
from unidist.strategy.plan import build, make_plan
from unidist_pipeline.schedules import (
    ActionKind,
    PipelineSize,
    Schedule,
    ScheduleSpec,
    StageTimes,
    build_schedule,
)
from unidist_pipeline.schedules.execution_model import MessageMode, steps_of
from unidist_pipeline.schedules.playback import play
from unidist_pipeline.simulation import Costs, simulate
from unidist_planner.memory.comparison import estimate_line
from unidist_planner.memory.transformer import Transformer
from unidist_planner.step_time.prediction import Prediction, predict
from unidist_planner.step_time.transformer import TransformerWork

FIGURES = Path(__file__).parent / "figures.json"


@dataclass(frozen=True)
class Point:
    """One published figure and ours.

    Args:
        table: its id.
        name: of the row.
        published: the figure.
        predicted: ours.
        digits: decimal places to show.
        tolerance: by which ours may differ, as a part of the published one.
    """

    table: str
    name: str
    published: float
    predicted: float
    digits: int
    tolerance: float

    @property
    def error(self) -> float:
        """How far ours is above the published one, as a part of that; where they must be equal, to its digits."""
        predicted = self.predicted if self.tolerance else round(self.predicted, self.digits)
        return predicted / self.published - 1


@cache
def figures() -> dict[str, Any]:
    """Return what `figures.json` holds."""
    found: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    return found


def points(table: Mapping[str, Any]) -> list[Point]:
    """Return the points of one table of `figures.json`."""
    return _points(table["id"])


@cache
def _points(table_id: str) -> list[Point]:
    (table,) = (table for table in figures()["tables"] if table["id"] == table_id)
    predicted = KINDS[table["kind"]]
    return [
        Point(
            table["id"],
            row["name"],
            row["published"],
            predicted({**table.get("all", {}), **row}),
            table.get("digits", 0),
            row.get("tolerance", table["tolerance"]),
        )
        for row in table["rows"]
    ]


@dataclass(frozen=True)
class MeasuredWork(ModelWork):
    """A model of which one accelerator's step time is known, and the number of parameters.

    Args:
        parameters: of the model.
        seconds: of the steps of one rank alone.
        batch: samples of a step on all ranks together.
        samples: that one rank computed in `seconds`.
    """

    parameters: int
    seconds: float
    batch: int
    samples: int
    num_blocks: int = field(default=1, init=False)

    __hash__ = object.__hash__

    def __post_init__(self) -> None:
        object.__setattr__(self, "divides", {})

    @override
    def workload(self, samples: int) -> Workload:
        return Workload(ModelFigures(self.parameters), optimizer="momentum", precision="fp32")

    @override
    def with_batch(self, batch: int) -> ModelWork:
        return replace(self, batch=batch)

    @override
    def forward(self, samples: int, itemsize: int) -> PieceWork:
        """Operations on a device that does one in a second: a third of the step, as backward is two."""
        return PieceWork(samples / self.samples * self.seconds / 3, 0.0, 0.0, 0.0)


class _Plugins:
    """The strategies of this installation that take part in a plan, and the systems of papers."""

    def __init__(self) -> None:
        self._manager = PluginManager().load()
        self.strategies: Registry[StrategySpec] = Registry("strategy")
        for name in ("data", "zero", "accumulate", "activations", "pipeline", "tensor", "parameter_server"):
            self.strategies.add(self._manager.strategies.get(name))
        for cls in SYSTEMS:
            self.strategies.add(StrategySpec(cls.name, f"{cls.__module__}:{cls.__name__}", "of a paper"))

    def registry(self, kind: type[Any]) -> Registry[Any]:
        return self.strategies if kind is StrategySpec else self._manager.registry(kind)


@cache
def _plugins() -> Any:
    return _Plugins()


@cache
def cluster(name: str) -> Cluster:
    """Return one of the machines of `figures.json`."""
    given = {key: value["value"] for key, value in figures()["machines"][name]["constants"].items()}
    links = {key: Link(*given.pop(key)) for key in ("inside", "between")}
    reached = Efficiency.constant(given.pop("efficiency_between"))
    return Cluster(**links, efficiency_between=reached, **given)


def predicted(row: Mapping[str, Any]) -> tuple[ModelWork, Prediction]:
    """Return the prediction of a step; where the paper does not say the micro-batch, the fastest of those given."""
    work: ModelWork
    if "seconds" in row:
        work = MeasuredWork(row["parameters"], row["seconds"], row["batch"], row["samples"])
    else:
        work = TransformerWork(Transformer(**row["model"]), row["batch"], precision=row["precision"])
    registry = _plugins().strategies
    problem = SearchProblem(work, cluster(row["machine"]), row["ranks"], _plugins())
    found = []
    for samples in row.get("micro_batches", [0]):
        pieces, rest = divmod(row["batch"], row["replicas"] * samples) if samples else (0, 0)
        if not rest:
            line = row["line"].format(pieces=pieces)
            found.append(predict(line, make_plan(build(line, registry), row["ranks"], registry), problem))
    return work, min(found, key=lambda item: item.seconds)


def _teraflops(row: Mapping[str, Any]) -> float:
    """Operations of the model in a second of one rank; with `recomputed`, the repeated forward pass counts too."""
    work, found = predicted(row)
    piece = work.forward(1, 2)
    forwards = 4 if row.get("recomputed") else 3
    return (forwards * piece.blocks + 3 * piece.outside) * work.batch / (found.seconds * row["ranks"]) / 1e12


def _tokens(row: Mapping[str, Any]) -> float:
    """Tokens in a second for each rank."""
    work, found = predicted(row)
    return work.batch * work.sequence / found.seconds / row["ranks"]


def _milliseconds(row: Mapping[str, Any]) -> float:
    return predicted(row)[1].seconds * 1e3


def _scaling(row: Mapping[str, Any]) -> float:
    """The time of one rank alone by that of all, in percent."""
    seconds: float = row["seconds"]
    return 100 * seconds / predicted(row)[1].seconds


def _times_as_fast(row: Mapping[str, Any]) -> float:
    """Steps in a second by those with the line `beside`."""
    return predicted({**row, "line": row["beside"]})[1].seconds / predicted(row)[1].seconds


def _samples(row: Mapping[str, Any]) -> float:
    """Samples in a second for each rank of a pipeline whose ranks do not wait for each other between steps."""
    longest = row["microbatches"] * sum(row["times"][:3]) / (1 - _bubble(row) / 100)
    return 1e3 * row["microbatches"] * row["micro_batch"] / longest / row["ranks"]


def _largest_billions(row: Mapping[str, Any]) -> float:
    """Parameters of the largest model whose states fit into the memory of a rank, in billions."""
    return row["gigabytes"] / _gigabytes({**row, "parameters": 1e9})


def _bubble(row: Mapping[str, Any]) -> float:
    """The part of the longest rank's span in which it does not compute, in percent (Qi et al. 2024, section 5.3)."""
    schedule, costs = _of_stages(row)
    return 100 * (1 - row["microbatches"] * sum(row["times"][:3]) / max(simulate(schedule, costs).spans))


def _of_stages(row: Mapping[str, Any]) -> tuple[Schedule, Costs]:
    """Return the schedule of a row with the times of a rank's stages, and these."""
    forward, backward_input, backward_weight, message = row["times"]
    times = StageTimes(forward, backward_input, backward_weight, message, row["kept"])
    registry = _plugins().registry(ScheduleSpec)
    stages = row.get("stages_per_rank", 1)
    schedule = build_schedule(
        row["schedule"],
        registry,
        num_ranks=row["ranks"],
        num_microbatches=row["microbatches"],
        stages_per_rank=stages,
        times=times if registry.get(row["schedule"]).searched else None,
    )
    return schedule, Costs(
        forward=forward / stages,
        backward=(backward_input + backward_weight) / stages,
        backward_weight=backward_weight / stages,
        message=message,
    )


def _bubble_of_first_waits(row: Mapping[str, Any]) -> float:
    """The same as the authors' script computes it for interleaved 1F1B.

    Where a micro-batch goes on from the last rank to the first, and back, the script waits for the message of the first
    micro-batch of each round only (`rank == 0` and `_rk == 0` in megatron/core/pipeline_parallel/interleave.py of
    https://github.com/sail-sg/zero-bubble-pipeline-parallelism).
    """
    schedule, costs = _of_stages(row)
    num_ranks, last = row["ranks"], schedule.num_stages - 1
    steps = steps_of(schedule, MessageMode.ASYNCHRONOUS, duration=costs.for_stages(schedule.num_stages).duration)
    for actions, list_of_rank in zip(schedule.ranks, steps, strict=True):
        for index, action in enumerate(actions):
            if action.microbatch is None or action.microbatch % num_ranks == 0:
                continue
            step = list_of_rank[index]
            if action.kind is ActionKind.FORWARD and action.stage and action.stage % num_ranks == 0:
                list_of_rank[index] = step._replace(needs=())
            if action.kind is ActionKind.BACKWARD and action.stage < last and (action.stage + 1) % num_ranks == 0:
                list_of_rank[index] = step._replace(needs=step.needs[:1])  # its own output
    longest = max(ends[-1] for ends in play(steps).ends)
    return 100 * (1 - row["microbatches"] * sum(row["times"][:3]) / longest)


def _speed_up(row: Mapping[str, Any]) -> float:
    """The speed-up over one accelerator if only the pipeline's bubble costs time (Huang et al. 2019, section 2.3)."""
    found = {}
    for ranks in (row["ranks"], row.get("relative_to", 1)):
        size = PipelineSize(ranks, row["microbatches"])
        registry = _plugins().registry(ScheduleSpec)
        schedule = build_schedule("gpipe", registry, num_ranks=ranks, num_microbatches=size.num_microbatches)
        found[ranks] = ranks / simulate(schedule, Costs()).makespan
    return found[row["ranks"]] / found[row.get("relative_to", 1)]


def _gigabytes(row: Mapping[str, Any]) -> float:
    """What a rank holds of the model, by `unidist estimate`."""
    workload = Workload(ModelFigures(round(row["parameters"])), precision="fp16")
    found = estimate_line(workload, row["line"], num_ranks=row["ranks"], registry=_plugins().strategies)
    return found.estimate.total() / 1e9


def _block_millions(row: Mapping[str, Any]) -> float:
    """Parameters of a transformer's block, in millions."""
    one, two = (Transformer(layers=n, **row["model"]).figures().parameters for n in (1, 2))
    return (two - one) / 1e6


KINDS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "teraflops": _teraflops,
    "tokens": _tokens,
    "milliseconds": _milliseconds,
    "scaling": _scaling,
    "bubble": _bubble,
    "bubble of first waits": _bubble_of_first_waits,
    "times as fast": _times_as_fast,
    "samples": _samples,
    "largest": _largest_billions,
    "speed-up": _speed_up,
    "gigabytes": _gigabytes,
    "block": _block_millions,
}
"""How each kind of table is predicted."""
