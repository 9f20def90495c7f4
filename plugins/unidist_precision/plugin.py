"""Registers the strategy `precision`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry, StrategyType


@hookimpl
def unidist_register_strategies(registry: Registry[StrategyType]) -> None:
    """Register `precision`."""
    registry.add(
        StrategyType(
            "precision",
            "unidist_precision.strategy:MixedPrecision",
            "compute in bf16 or fp16, update in float32; the loss is scaled where gradients would vanish",
        )
    )
