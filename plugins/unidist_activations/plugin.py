"""Registers the strategy `activations`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry, StrategyType


@hookimpl
def unidist_register_strategies(registry: Registry[StrategyType]) -> None:
    """Register `activations`."""
    registry.add(
        StrategyType(
            "activations",
            "unidist_activations.strategy:Activations",
            "compute activations again in the backward pass, or keep them outside of the device, block by block",
        )
    )
