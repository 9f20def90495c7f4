"""Memory and time estimates of a pipeline for the planner, by simulating its schedule.

Large pipelines are not played through as they are. With p ranks and m micro-batches, the idle time and what is held of
micro-batches grow with p where m/p stays the same, and with m where p stays the same, both evenly: so they are
simulated on at most `LARGEST` ranks with at most `MOST` micro-batches for each, and continued from there. For GPipe and
1F1B that is exact, and it holds for schedules of other plugins, whose formulas nobody knows here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from typing_extensions import override

from unidist.cost_model.step import Order, RankStep
from unidist.cost_model.step_interface import RemainingRanks, SearchProblem, divisors
from unidist.errors import ConfigurationError
from unidist.runtime.plugin_manager import PluginManager
from unidist.settings.environment import Settings
from unidist_pipeline.schedules.catalog import build_schedule
from unidist_pipeline.schedules.model import StageTimes
from unidist_pipeline.schedules.registration import ScheduleSpec
from unidist_pipeline.simulation.costs import Costs
from unidist_pipeline.simulation.simulator import Simulation, peak_activations, simulate

if TYPE_CHECKING:
    from unidist.cost_model.figures import ModelFigures, Workload
    from unidist.cost_model.memory import RankMemory
    from unidist.cost_model.work import ModelWork
    from unidist.registry import Registry
    from unidist_pipeline.schedules.model import Schedule

AXIS = "pipeline"
LARGEST = 8
"""Ranks that are simulated; more are continued from these."""
OUTSIDE = 2
"""Stages without a block that a model can have: the embedding, and the head."""
MOST = 4
"""Micro-batches for each of these ranks, likewise."""


@dataclass(frozen=True)
class Pipe:
    """A pipeline as the strategy line describes it.

    Args:
        schedule: name of a registered schedule.
        num_ranks: ranks of the pipeline.
        num_microbatches: pieces of the batch that the script passes.
        stages_per_rank: None: the schedule's own.
        limit: micro-batches that a rank may hold, for schedules that are searched; None: the schedule's own.
        kept: of these, the part that a rank holds between the two parts of a backward.
    """

    schedule: str
    num_ranks: int
    num_microbatches: int
    stages_per_rank: int | None = None
    limit: float | None = None
    kept: float = 1.0

    def stages(self, registry: Registry[ScheduleSpec]) -> int:
        """Return the stages on each rank."""
        spec = registry.get(self.schedule, hint="`unidist pipeline list` shows them.")
        return self.stages_per_rank or spec.stages_per_rank


def predicted(step: RankStep, pipe: Pipe, problem: SearchProblem) -> RankStep:
    """Return the step with its blocks divided over the ranks of a pipeline; see `PredictsStepTime.predict`.

    Raises:
        ConfigurationError: the model has fewer blocks than stages, or the schedule does not exist for these sizes.
    """
    registry = problem.plugins.registry(ScheduleSpec)
    num_stages = pipe.num_ranks * pipe.stages(registry)
    if problem.work.num_blocks + OUTSIDE < num_stages:
        raise ConfigurationError(
            f"pipeline={pipe.num_ranks}:schedule={pipe.schedule} has {num_stages} stages, but the model only "
            f"{problem.work.num_blocks} blocks, and what comes before and after them. Use a smaller pipeline, or a "
            "schedule with fewer stages on each rank."
        )
    model = problem.work.workload(1).model
    step = step.divided(
        pipe.num_ranks,
        blocks=1 / pipe.num_ranks,
        traffic=1 / pipe.num_ranks,
        parameters=_most_parameters(model, pipe.num_ranks),
        uneven=_unevenness(problem.work, pipe.num_ranks, pipe.stages(registry)),
    )
    return step.in_pieces(pipe.num_microbatches).in_order(Played(pipe, registry))


def estimated(memory: RankMemory, workload: Workload, pipe: Pipe) -> RankMemory:
    """Return the memory of a rank for its stages, and for waiting micro-batches; see `EstimatesMemory.estimate`.

    Blocks are divided evenly; the stage with the embedding holds that in addition.
    """
    held = held_microbatches(pipe, schedules())
    share = held / (pipe.num_microbatches * pipe.num_ranks)
    most = _most_parameters(workload.model, pipe.num_ranks)
    memory = memory.split(1 / most, "parameters", "gradients", "master", "optimizer")
    activations = replace(memory.activations, share=memory.activations.share * share)
    return replace(memory, activations=activations)


def proposed(remaining: RemainingRanks) -> Sequence[str]:
    """Return the pipelines that fit the remaining ranks: the stages divide the blocks, and the micro-batches the batch.

    With fewer micro-batches than ranks most of a pipeline is idle, so these are tried only if there are no others.
    """
    blocks, found = remaining.problem.work.num_blocks, []
    for num_ranks in divisors(remaining.ranks)[1:]:
        samples = remaining.samples(num_ranks)
        counts = divisors(samples) if samples else []
        enough = [count for count in counts if count >= num_ranks] or counts[-1:]
        for spec in remaining.problem.plugins.registry(ScheduleSpec):
            if blocks % (num_ranks * spec.stages_per_rank) == 0:
                found += [f"pipeline={num_ranks}:schedule={spec.name}:microbatches={count}" for count in enough]
    return found


def _most_parameters(model: ModelFigures, num_ranks: int) -> float:
    """Return the fraction of all parameters on the rank with the embedding, or an equal share if that is unknown."""
    outside = (model.outside or 0) / model.parameters if num_ranks > 1 else 0.0
    return (1 - outside) / num_ranks + outside


@lru_cache(maxsize=1024)
def _unevenness(work: ModelWork, num_ranks: int, stages_per_rank: int) -> float:
    """Return the work of the busiest rank relative to the average, if whole blocks are divided as well as possible.

    The last stage computes the head too, so it may get fewer blocks than the others.
    """
    piece, blocks = work.forward(1, 1), work.num_blocks
    head = piece.outside / (piece.blocks / blocks)
    others = num_ranks * stages_per_rank - 1
    if not others:
        return 1.0
    loads = []
    for last in range(blocks + 1):
        each = -(-(blocks - last) // others)
        loads.append(max(stages_per_rank * each, (stages_per_rank - 1) * each + last + head))
    return min(loads) / ((blocks + head) / num_ranks)


@dataclass(frozen=True)
class Played(Order):
    """The order of a schedule, by simulation.

    Args:
        pipe: which.
        registry: has its schedule.
    """

    pipe: Pipe
    registry: Registry[ScheduleSpec]
    axis = AXIS

    @override
    def seconds(self, num_pieces: int, forward: float, backward: float, message: float) -> float:
        piece = forward + backward
        if not piece:
            return 0.0
        pipe = replace(self.pipe, num_microbatches=num_pieces)
        # Times are rounded to two or three digits, so that simulations are found again.
        share, delay = round(forward / piece, 3), float(f"{message / piece:.1e}")
        return piece * (num_pieces + idle_microbatches(pipe, self.registry, share, delay))

    def at_least(self, num_pieces: int, forward: float, backward: float) -> float:
        """The last rank cannot begin before the first micro-batch has come through all ranks before it."""
        first = (self.pipe.num_ranks - 1) * forward / self.pipe.stages(self.registry)
        return num_pieces * (forward + backward) + first


def idle_microbatches(pipe: Pipe, registry: Registry[ScheduleSpec], forward: float, message: float) -> float:
    """Return the total idle time of a pipeline's ranks, in units of one micro-batch's forward and backward pass.

    Args:
        pipe: which.
        registry: has its schedule.
        forward: the fraction of a micro-batch's time that its forward pass takes.
        message: time of a message, in units of a micro-batch.
    """

    def idle(num_ranks: int, num_microbatches: int) -> float:
        found = _simulated(_source(pipe, registry), num_ranks, num_microbatches, forward, message)
        return found.makespan - num_microbatches

    return 0.0 if pipe.num_ranks == 1 else _continued(pipe, idle)


@lru_cache(maxsize=4096)
def held_microbatches(pipe: Pipe, registry: Registry[ScheduleSpec]) -> float:
    """Return the most micro-batches that a rank holds at a time, counted in activations of all its stages."""

    def held(num_ranks: int, num_microbatches: int) -> float:
        return _peak(_source(pipe, registry), num_ranks, num_microbatches)

    return min(float(pipe.num_microbatches), _continued(pipe, held))


def _continued(pipe: Pipe, measured: Callable[[int, int], float]) -> float:
    """Return `measured`, a function of ranks and micro-batches, for the pipeline; extrapolated if it is large."""
    if pipe.num_ranks <= LARGEST:
        return _with_microbatches(pipe.num_ranks, pipe.num_microbatches, measured)
    half = LARGEST // 2
    small, large = (
        _with_microbatches(ranks, pipe.num_microbatches * ranks / pipe.num_ranks, measured) for ranks in (half, LARGEST)
    )
    return large + (pipe.num_ranks - LARGEST) * (large - small) / (LARGEST - half)


def _with_microbatches(num_ranks: int, num_microbatches: float, measured: Callable[[int, int], float]) -> float:
    most = MOST * num_ranks
    if num_microbatches <= most:
        return measured(num_ranks, max(1, round(num_microbatches)))
    found = measured(num_ranks, most)
    return found + (num_microbatches - most) * (found - measured(num_ranks, most - num_ranks)) / num_ranks


@dataclass(frozen=True)
class _Source:
    """The source of a schedule; equal for equal specs, so that earlier simulations are found again."""

    spec: ScheduleSpec
    stages_per_rank: int
    limit_each: float | None
    kept: float
    registry: Registry[ScheduleSpec] = field(compare=False)


def _source(pipe: Pipe, registry: Registry[ScheduleSpec]) -> _Source:
    limit = None if pipe.limit is None else pipe.limit / pipe.num_ranks
    return _Source(registry.get(pipe.schedule), pipe.stages(registry), limit, pipe.kept, registry)


@lru_cache(maxsize=4096)
def _simulated(source: _Source, num_ranks: int, num_microbatches: int, forward: float, message: float) -> Simulation:
    costs = _costs(source, forward, message)
    return simulate(_built(source, num_ranks, num_microbatches, _times(source, costs)), costs)


@lru_cache(maxsize=4096)
def _peak(source: _Source, num_ranks: int, num_microbatches: int) -> float:
    costs = _costs(source, 1 / 3, 0.0)
    schedule = _built(source, num_ranks, num_microbatches, _times(source, costs), messages=False)
    return max(peak_activations(schedule, costs.for_stages(schedule.num_stages)))


def _costs(source: _Source, forward: float, message: float) -> Costs:
    """Return the costs of the stages, in units of one micro-batch's forward and backward pass."""
    stages, backward = source.stages_per_rank, 1 - forward
    return Costs(
        forward=forward / stages,
        backward=backward / stages,
        # The weights' gradient is as much arithmetic as a forward; a recomputation belongs to the other part.
        backward_weight=min(backward / 2, forward) / stages,
        message=message,
        activation=1 / stages,
        kept_for_weight=source.kept,
    )


def _times(source: _Source, costs: Costs) -> StageTimes:
    """Return what a schedule is searched for: these costs, rank by rank."""
    return costs.mean_times(1) if source.spec.searched else StageTimes()


@lru_cache(maxsize=1024)
def _built(
    source: _Source, num_ranks: int, num_microbatches: int, times: StageTimes, *, messages: bool = True
) -> Schedule:
    searched = source.spec.searched
    limit = None if source.limit_each is None else max(1.0, source.limit_each * num_ranks)
    return build_schedule(
        source.spec.name,
        source.registry,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        stages_per_rank=source.stages_per_rank,
        times=times if searched else None,
        limit=limit if searched else None,
        validated=False,  # a plan looks at hundreds of sizes; the ranks validate the one that they run
        messages=messages,
    )


@cache
def schedules() -> Registry[ScheduleSpec]:
    """Return the schedules of this installation, for callers without a plugin manager."""
    return PluginManager(Settings.read().disabled_plugins).load().registry(ScheduleSpec)
