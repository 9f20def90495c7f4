"""Registers the strategy `accumulate`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist.strategy import StrategySpec


@hookimpl
def unidist_register_strategies(registry: Registry[StrategySpec]) -> None:
    """Register `accumulate`."""
    registry.add(
        StrategySpec(
            "accumulate",
            "unidist_accumulate.strategy:Accumulate",
            "add up the gradients of N backward passes per update",
        )
    )
