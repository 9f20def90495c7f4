"""Registers the strategy `local_sgd`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist.strategy import BindingSpec, StrategySpec


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


@hookimpl
def unidist_register_bindings(registry: Registry[BindingSpec]) -> None:
    """Register the bindings to frameworks."""
    registry.add(BindingSpec("local_sgd", "torch", "unidist_local_sgd._torch.step:TorchLocalSGD"))
    registry.add(BindingSpec("local_sgd", "tensorflow", "unidist_local_sgd._keras.step:KerasLocalSGD"))
    registry.add(BindingSpec("local_sgd", "jax", "unidist_local_sgd._jax.step:JaxLocalSGD"))
