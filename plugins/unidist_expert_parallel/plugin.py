"""Registers the strategy `expert`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist.strategy import BindingSpec, StrategySpec


@hookimpl
def unidist_register_strategies(registry: Registry[StrategySpec]) -> None:
    """Register `expert`."""
    registry.add(
        StrategySpec(
            "expert",
            "unidist_expert_parallel.strategy:ExpertParallel",
            "divide the experts of mixture-of-experts layers over ranks; tokens travel to them",
        )
    )


@hookimpl
def unidist_register_bindings(registry: Registry[BindingSpec]) -> None:
    """Register the bindings to frameworks."""
    registry.add(BindingSpec("expert", "torch", "unidist_expert_parallel._torch.binding:TorchExperts"))
    registry.add(BindingSpec("expert", "tensorflow", "unidist_expert_parallel._keras.binding:KerasExperts"))
