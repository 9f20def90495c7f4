"""Schedules of pipeline parallelism as data: built, validated, found by name, read from files and written to them.

`model` defines a schedule; `classic`, `zero_bubble`, `searched` and `v_shape` make ours by `builder`. Loaded by the
launcher: imports the core's errors and registry only, no numpy and no framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_pipeline.schedules.builder import complete, with_gathers
    from unidist_pipeline.schedules.catalog import build_schedule
    from unidist_pipeline.schedules.execution_model import MessageMode
    from unidist_pipeline.schedules.files import read_schedule, write_schedule
    from unidist_pipeline.schedules.model import (
        Action,
        ActionKind,
        PipelineSize,
        Schedule,
        ScheduleError,
        StageTimes,
        parse_action,
        round_robin,
        v_shaped,
    )
    from unidist_pipeline.schedules.registration import ScheduleSpec
    from unidist_pipeline.schedules.validation import validate

__all__ = [
    "Action", "ActionKind", "MessageMode", "PipelineSize", "Schedule", "ScheduleError", "ScheduleSpec", "StageTimes",
    "build_schedule", "complete", "parse_action", "read_schedule", "round_robin", "v_shaped", "validate",
    "with_gathers", "write_schedule",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "builder": "complete with_gathers",
        "catalog": "build_schedule",
        "execution_model": "MessageMode",
        "files": "read_schedule write_schedule",
        "model": "Action ActionKind PipelineSize Schedule ScheduleError StageTimes parse_action round_robin v_shaped",
        "registration": "ScheduleSpec",
        "validation": "validate",
    },
)
