"""Registers the strategy `zero`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist.strategy import BindingSpec, StrategySpec


@hookimpl
def unidist_register_strategies(registry: Registry[StrategySpec]) -> None:
    """Register `zero`."""
    registry.add(
        StrategySpec(
            "zero",
            "unidist_zero.strategy:Zero",
            "shard optimizer state (1), gradients (2) and parameters (3) over the ranks",
        )
    )


@hookimpl
def unidist_register_bindings(registry: Registry[BindingSpec]) -> None:
    """Register the bindings to frameworks."""
    registry.add(BindingSpec("zero", "torch", "unidist_zero._torch.step:TorchZero"))
    registry.add(BindingSpec("zero", "tensorflow", "unidist_zero._keras.step:KerasZero"))
    registry.add(BindingSpec("zero", "jax", "unidist_zero._jax.step:JaxZero"))
