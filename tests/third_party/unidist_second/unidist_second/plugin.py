"""What this distribution registers. Loaded in every process that uses unidist: specs only, nothing heavy."""

from __future__ import annotations

from unidist import hookimpl
from unidist.framework import FrameworkSpec
from unidist.registry import Registry
from unidist.strategy import BindingSpec, StrategySpec


@hookimpl
def unidist_register_frameworks(registry: Registry[FrameworkSpec]) -> None:
    """Register `numpy`."""
    registry.add(
        FrameworkSpec(
            "numpy",
            "unidist_second.framework:NumpyFramework",
            requires="numpy",
            summary="a sample: arrays as tensors, gradients by hand",
            conformance="unidist_second.conformance",
        )
    )


@hookimpl
def unidist_register_strategies(registry: Registry[StrategySpec]) -> None:
    """Register `small-zero` and `local-sgd`."""
    registry.add(
        StrategySpec(
            "small-zero",
            "unidist_second.small_zero:SmallZero",
            "a sample: each rank updates some of the parameters, and keeps their optimizer state",
        )
    )
    registry.add(
        StrategySpec(
            "local-sgd",
            "unidist_second.local_sgd:LocalSGD",
            "a sample: every rank trains by itself, and parameters are averaged every N updates",
        )
    )


@hookimpl
def unidist_register_bindings(registry: Registry[BindingSpec]) -> None:
    """Register our strategy for a framework of unidist's, and a strategy of unidist's for our framework."""
    registry.add(BindingSpec("small-zero", "torch", "unidist_second.small_zero_torch:TorchSmallZero"))
    registry.add(BindingSpec("zero", "numpy", "unidist_second.zero:NumpyZero"))
