"""Registers the strategy `context`, and `ud.context`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.facade import FacadeNameSpec
from unidist.registry import Registry
from unidist.strategy import BindingSpec, StrategySpec


@hookimpl
def unidist_register_strategies(registry: Registry[StrategySpec]) -> None:
    """Register `context`."""
    registry.add(
        StrategySpec(
            "context",
            "unidist_context_parallel.strategy:ContextParallel",
            "divide the tokens of each sample over ranks, for long sequences; attention exchanges keys and values",
        )
    )


@hookimpl
def unidist_register_bindings(registry: Registry[BindingSpec]) -> None:
    """Register the bindings to frameworks."""
    registry.add(BindingSpec("context", "torch", "unidist_context_parallel._torch.binding:TorchContext"))
    registry.add(BindingSpec("context", "tensorflow", "unidist_context_parallel._keras.binding:KerasContext"))
    registry.add(BindingSpec("context", "jax", "unidist_context_parallel._jax.binding:JaxContext"))


@hookimpl
def unidist_register_facade_names(registry: Registry[FacadeNameSpec]) -> None:
    """Register `ud.context`."""
    for framework in ("torch", "jax"):
        registry.add(FacadeNameSpec(framework, "context", f"unidist_context_parallel.{framework}"))
