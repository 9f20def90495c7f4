"""Registers the strategy `local_sgd`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist.strategy import StrategySpec


@hookimpl
def unidist_register_strategies(registry: Registry[StrategySpec]) -> None:
    """Register `local_sgd`."""
    registry.add(
        StrategySpec(
            "local_sgd",
            "unidist_local_sgd.strategy:LocalSGD",
            "H updates without communication, then parameters are synchronized (local SGD, DiLoCo)",
        )
    )
