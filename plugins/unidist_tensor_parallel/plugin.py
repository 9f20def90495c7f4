"""Registers the strategy `tensor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist import hookimpl
from unidist.registry import Registry
from unidist.strategy import BindingSpec, StrategySpec
from unidist_tensor_parallel import library_roles
from unidist_tensor_parallel.library_roles import TensorRolesSpec

if TYPE_CHECKING:
    from unidist.runtime.plugin_manager import PluginManager


@hookimpl
def unidist_add_kinds(manager: PluginManager) -> None:
    """Let plugins register libraries that say which layers of their models to cut."""
    manager.add_kind(TensorRolesSpec, library_roles)


@hookimpl
def unidist_register_strategies(registry: Registry[StrategySpec]) -> None:
    """Register `tensor`."""
    registry.add(
        StrategySpec(
            "tensor",
            "unidist_tensor_parallel.strategy:TensorParallel",
            "cut large layers over neighbouring ranks: attention by heads, pairs of linear layers, the vocabulary",
        )
    )


@hookimpl
def unidist_register_bindings(registry: Registry[BindingSpec]) -> None:
    """Register the bindings to frameworks."""
    registry.add(BindingSpec("tensor", "torch", "unidist_tensor_parallel._torch.binding:TorchTensor"))
    registry.add(BindingSpec("tensor", "tensorflow", "unidist_tensor_parallel._keras.binding:KerasTensor"))
    registry.add(BindingSpec("tensor", "jax", "unidist_tensor_parallel._jax.binding:JaxTensor"))
