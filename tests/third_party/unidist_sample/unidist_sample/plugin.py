"""What this distribution registers. Loaded in every process that uses unidist: specs only, nothing heavy."""

from __future__ import annotations

from unidist import hookimpl
from unidist.engine import EngineSpec
from unidist.gradients import CompressorSpec
from unidist.registry import Registry
from unidist.strategy import StrategySpec
from unidist_pipeline.schedules.registration import ScheduleSpec


@hookimpl
def unidist_register_engines(registry: Registry[EngineSpec]) -> None:
    """Register `sample-sockets`. Below 0, `--engine auto` leaves it alone: it is used when asked for."""
    registry.add(
        EngineSpec(
            "sample-sockets",
            "unidist_sample.sockets:SocketEngine",
            "a sample: Unix sockets between the processes of one host",
            priority=-1,
        )
    )


@hookimpl
def unidist_register_strategies(registry: Registry[StrategySpec]) -> None:
    """Register the strategies; `noise` and `lars` are rules on gradients."""
    registry.add(
        StrategySpec(
            "sample-compress",
            "unidist_sample.compress:CompressedData",
            "a sample: data parallelism with gradients that travel as bfloat16 or float16",
        )
    )
    registry.add(StrategySpec("noise", "unidist_sample.noise:Noise", "a sample: noise on every element"))
    registry.add(StrategySpec("lars", "unidist_sample.lars:Lars", "a sample: gradients as long as their parameters"))
    registry.add(
        StrategySpec("sample-board", "unidist_sample.board:Board", "a sample: a process beside the ranks answers them")
    )


@hookimpl
def unidist_register_compressors(registry: Registry[CompressorSpec]) -> None:
    """Register `sample-signs`."""
    registry.add(
        CompressorSpec("sample-signs", "unidist_sample.signs:Signs", "a sample: signs and one magnitude travel")
    )


@hookimpl
def unidist_register_schedules(registry: Registry[ScheduleSpec]) -> None:
    """Register `sample-eager`."""
    registry.add(
        ScheduleSpec(
            "sample-eager",
            "unidist_sample.eager:eager",
            "a sample: 1f1b for slow messages, with twice as many micro-batches",
        )
    )
