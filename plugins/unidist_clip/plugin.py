"""Registers the strategies `clip_norm` and `clip_value`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry, StrategyType


@hookimpl
def unidist_register_strategies(registry: Registry[StrategyType]) -> None:
    """Register both."""
    registry.add(
        StrategyType("clip_norm", "unidist_clip.strategy:ClipNorm", "scale the gradient down to a norm, over all ranks")
    )
    registry.add(
        StrategyType("clip_value", "unidist_clip.strategy:ClipValue", "move each element of the gradient into a range")
    )
