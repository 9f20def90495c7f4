"""Registers the strategy `activations`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist.strategy import BindingSpec, StrategySpec


@hookimpl
def unidist_register_strategies(registry: Registry[StrategySpec]) -> None:
    """Register `activations`."""
    registry.add(
        StrategySpec(
            "activations",
            "unidist_activations.strategy:Activations",
            "compute activations again in the backward pass, or keep them outside of the device, block by block",
        )
    )


@hookimpl
def unidist_register_bindings(registry: Registry[BindingSpec]) -> None:
    """Register the bindings to frameworks."""
    registry.add(BindingSpec("activations", "torch", "unidist_activations._torch:TorchModelBinding"))
    registry.add(BindingSpec("activations", "tensorflow", "unidist_activations._keras:TensorFlowModelBinding"))
