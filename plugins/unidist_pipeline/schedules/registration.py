"""Registration of schedules: a kind of plugin that this package adds to those of the core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pluggy

from unidist.registry import Registry, load_object

__all__ = ["ScheduleSpec"]

hookspec = pluggy.HookspecMarker("unidist")


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule of pipeline parallelism, not yet imported.

    Args:
        name: the word in `schedule=`.
        path: "module:function"; the function takes a `PipelineSize` and returns a `Schedule`, both of
            `unidist_pipeline.schedules.model`. Its module is loaded by the launcher too: it imports no framework and no
            numpy at the top.
        summary: one line for lists.
        stages_per_rank: stages on each rank if the user says nothing.
        searched: the function looks at `PipelineSize.times` and `limit`, so that these make another schedule.
    """

    kind: ClassVar[str] = "schedule"
    hook: ClassVar[str] = "unidist_register_schedules"

    name: str
    path: str
    summary: str
    stages_per_rank: int = 1
    searched: bool = False

    def load(self) -> object:
        """Import and return the function; the plugin of pipelines, which calls it, checks that it is one."""
        return load_object(self.path, f"schedule {self.name!r}")


@hookspec
def unidist_register_schedules(registry: Registry[ScheduleSpec]) -> None:
    """Register schedules of pipeline parallelism. Their modules import no framework and no numpy at the top."""
