"""Registers the strategy `tensor`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry, StrategyType


@hookimpl
def unidist_register_strategies(registry: Registry[StrategyType]) -> None:
    """Register `tensor`."""
    registry.add(
        StrategyType(
            "tensor",
            "unidist_tensor_parallel.strategy:Tensor",
            "cut large layers over neighbouring ranks: attention by heads, pairs of linear layers, the vocabulary",
        )
    )
