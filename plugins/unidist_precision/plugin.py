"""Registers the strategy `precision`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist.strategy import BindingSpec, StrategySpec


@hookimpl
def unidist_register_strategies(registry: Registry[StrategySpec]) -> None:
    """Register `precision`."""
    registry.add(
        StrategySpec(
            "precision",
            "unidist_precision.strategy:MixedPrecision",
            "compute in bf16 or fp16, update in float32; the loss is scaled where gradients would vanish",
        )
    )


@hookimpl
def unidist_register_bindings(registry: Registry[BindingSpec]) -> None:
    """Register the bindings to frameworks."""
    registry.add(BindingSpec("precision", "torch", "unidist_precision._torch:TorchPrecision"))
    registry.add(BindingSpec("precision", "tensorflow", "unidist_precision._keras:TensorFlowPrecision"))
    registry.add(BindingSpec("precision", "jax", "unidist_precision._jax:JaxPrecision"))
