"""Schedules by name: looked up in the registry, built for a size, and validated, including those of other plugins."""

from __future__ import annotations

from unidist.errors import ConfigurationError, PluginError
from unidist.registry import Registry
from unidist_pipeline.schedules.model import PipelineSize, Schedule, ScheduleError, StageTimes
from unidist_pipeline.schedules.registration import ScheduleSpec
from unidist_pipeline.schedules.validation import validate


def build_schedule(
    name: str,
    registry: Registry[ScheduleSpec],
    *,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    times: StageTimes | None = None,
    limit: float | None = None,
    validated: bool = True,
    messages: bool = True,
) -> Schedule:
    """Return the schedule called `name`, built for a size and validated. Pure: every rank gets the same.

    Args:
        name: as registered.
        registry: `PluginManager.registry(ScheduleSpec)`.
        num_ranks: ranks of the pipeline.
        num_microbatches: pieces of the batch.
        stages_per_rank: stages on each rank; default: the schedule's own.
        times: for a schedule that is searched; default: forward and both parts of a backward take equally long.
        limit: likewise, the micro-batches that a rank may hold; default: the schedule's own.
        validated: False only to look at it, never to run it: validating takes longer than building.
        messages: see `PipelineSize`; without them nothing is validated.

    Raises:
        ConfigurationError: there is no such schedule, it does not exist for this size, or it is not searched.
        PluginError: what the plugin registered is not a function that returns a schedule, or the schedule is invalid.
    """
    spec = registry.get(name, hint="`unidist pipeline list` shows them.")
    if not spec.searched and (times is not None or limit is not None):
        searched = ", ".join(other.name for other in registry if other.searched) or "(none)"
        raise ConfigurationError(
            f"schedule {name!r} is always the same; times and limit are for those that are searched: {searched}."
        )
    size = PipelineSize(
        num_ranks,
        num_microbatches,
        spec.stages_per_rank if stages_per_rank is None else stages_per_rank,
        times or StageTimes(),
        limit,
        messages,
    )
    whose = f"schedule {name!r} of plugin {registry.origin_of(name)}"
    function = spec.load()
    if not callable(function):
        raise PluginError(f"{whose}: {spec.path!r} is no function that takes a PipelineSize, but {function!r}.")
    try:
        schedule = function(size)
        if not isinstance(schedule, Schedule):
            raise PluginError(f"{whose}: {spec.path!r} returned {type(schedule).__name__}; return a Schedule.")
        if validated and messages:
            validate(schedule)
    except ScheduleError as exc:
        raise PluginError(f"{whose}, for {size}: {exc}") from exc
    found = (schedule.num_ranks, schedule.num_microbatches, schedule.num_stages)
    if found != (size.num_ranks, size.num_microbatches, size.num_stages):
        raise PluginError(
            f"{whose}: asked for {size}, but it returned a schedule for {found[0]} ranks, {found[1]} micro-batches and "
            f"{found[2]} stages."
        )
    return schedule
