"""Registers the strategy `pipeline`, the schedules of pipeline parallelism, and the commands `unidist pipeline ...`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist import hookimpl
from unidist.registry import Registry
from unidist.strategy import BindingSpec, StrategySpec
from unidist_launch.command_spec import CommandSpec
from unidist_pipeline.schedules import registration
from unidist_pipeline.schedules.registration import ScheduleSpec

if TYPE_CHECKING:
    from unidist.runtime.plugin_manager import PluginManager


@hookimpl
def unidist_add_kinds(manager: PluginManager) -> None:
    """Let plugins register schedules."""
    manager.add_kind(ScheduleSpec, registration)


@hookimpl
def unidist_register_strategies(registry: Registry[StrategySpec]) -> None:
    """Register `pipeline`."""
    registry.add(
        StrategySpec(
            "pipeline",
            "unidist_pipeline.strategy:Pipeline",
            "consecutive layers on consecutive ranks, through which a batch goes in micro-batches",
        )
    )


@hookimpl
def unidist_register_schedules(registry: Registry[ScheduleSpec]) -> None:
    """Register the schedules of this package."""
    registry.add(
        ScheduleSpec(
            "gpipe",
            "unidist_pipeline.schedules.classic:gpipe",
            "all forwards, then all backwards; holds every micro-batch",
        )
    )
    registry.add(
        ScheduleSpec(
            "1f1b",
            "unidist_pipeline.schedules.classic:one_forward_one_backward",
            "as short as gpipe, but holds at most as many micro-batches as there are stages",
        )
    )
    registry.add(
        ScheduleSpec(
            "interleaved",
            "unidist_pipeline.schedules.classic:interleaved",
            "1f1b with several stages on each rank: idle time divided by their number, more messages",
            stages_per_rank=2,
        )
    )
    registry.add(
        ScheduleSpec(
            "zb-h1",
            "unidist_pipeline.schedules.zero_bubble:zb_h1",
            "1f1b with late weight gradients (ZB1P): a third of its idle time in the same memory",
        )
    )
    registry.add(
        ScheduleSpec(
            "zb-h2",
            "unidist_pipeline.schedules.zero_bubble:zb_h2",
            "like zb-h1, but no rank ever waits between its first and last action, in twice the memory",
        )
    )
    registry.add(
        ScheduleSpec(
            "zb-1p",
            "unidist_pipeline.schedules.searched:zb_1p",
            "searched for the times of the stages: least idle time in the memory of 1f1b, or in limit=N",
            searched=True,
        )
    )
    registry.add(
        ScheduleSpec(
            "zb-2p",
            "unidist_pipeline.schedules.searched:zb_2p",
            "searched likewise, in twice the memory of 1f1b: hardly any idle time",
            searched=True,
        )
    )
    registry.add(
        ScheduleSpec(
            "zbv",
            "unidist_pipeline.schedules.v_shape:zbv",
            "two stages on each rank, in a V: no rank waits between its first and last action, memory as 1f1b",
            stages_per_rank=2,
        )
    )
    registry.add(
        ScheduleSpec(
            "dualpipev",
            "unidist_pipeline.schedules.dualpipe:dualpipev",
            "two stages on each rank, in a V: forwards beside full backwards, messages of one during the other",
            stages_per_rank=2,
        )
    )
    registry.add(
        ScheduleSpec(
            "v-half",
            "unidist_pipeline.schedules.v_shape:v_half",
            "two stages on each rank, in a V: half the idle time of 1f1b in half its memory",
            stages_per_rank=2,
        )
    )
    registry.add(
        ScheduleSpec(
            "v-min",
            "unidist_pipeline.schedules.v_shape:v_min",
            "two stages on each rank, in a V: two thirds of the idle time of 1f1b in a third of its memory",
            stages_per_rank=2,
        )
    )


@hookimpl
def unidist_register_commands(registry: Registry[CommandSpec]) -> None:
    """Register `unidist pipeline`."""
    registry.add(
        CommandSpec(
            "pipeline",
            "unidist_pipeline.pipeline_command:pipeline",
            "List, draw and simulate schedules of pipeline parallelism.",
        )
    )


@hookimpl
def unidist_register_bindings(registry: Registry[BindingSpec]) -> None:
    """Register the bindings to frameworks."""
    registry.add(BindingSpec("pipeline", "torch", "unidist_pipeline._torch.binding:TorchPipeline"))
    registry.add(BindingSpec("pipeline", "tensorflow", "unidist_pipeline._keras.binding:KerasPipeline"))
    registry.add(BindingSpec("pipeline", "jax", "unidist_pipeline._jax.binding:JaxPipeline"))
