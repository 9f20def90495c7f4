"""Registers the strategy `accumulate`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry, StrategyType


@hookimpl
def unidist_register_strategies(registry: Registry[StrategyType]) -> None:
    """Register `accumulate`."""
    registry.add(
        StrategyType(
            "accumulate",
            "unidist_accumulate.strategy:Accumulate",
            "add up the gradients of N backward passes per update",
        )
    )
