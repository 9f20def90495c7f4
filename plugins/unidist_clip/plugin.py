"""Registers the strategies `clip_norm` and `clip_value`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist.strategy import StrategySpec


@hookimpl
def unidist_register_strategies(registry: Registry[StrategySpec]) -> None:
    """Register both."""
    registry.add(
        StrategySpec("clip_norm", "unidist_clip.strategy:ClipNorm", "scale the gradient down to a norm, over all ranks")
    )
    registry.add(
        StrategySpec("clip_value", "unidist_clip.strategy:ClipValue", "move each element of the gradient into a range")
    )
