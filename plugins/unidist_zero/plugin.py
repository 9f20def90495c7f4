"""Registers the strategy `zero`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry, StrategyType


@hookimpl
def unidist_register_strategies(registry: Registry[StrategyType]) -> None:
    """Register `zero`."""
    registry.add(
        StrategyType(
            "zero",
            "unidist_zero.strategy:Zero",
            "share optimizer state (1), gradients (2) and parameters (3) over the ranks",
        )
    )
