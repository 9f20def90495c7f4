"""Registers the strategy `parameter_server`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist.strategy import BindingSpec, StrategySpec


@hookimpl
def unidist_register_strategies(registry: Registry[StrategySpec]) -> None:
    """Register `parameter_server`, and `central_storage`."""
    registry.add(
        StrategySpec(
            "parameter_server",
            "unidist_parameter_server.strategy:ParameterServer",
            "keep parameters in shared memory, to which workers push gradients, together (sync) or at once (async)",
            launch_options=(("servers", "Server processes beside the ranks, of parameter_server."),),
        )
    )
    registry.add(
        StrategySpec(
            "central_storage",
            "unidist_parameter_server.strategy:CentralStorage",
            "tf.distribute's CentralStorageStrategy: `parameter_server=sync`",
        )
    )


@hookimpl
def unidist_register_bindings(registry: Registry[BindingSpec]) -> None:
    """Register the bindings to frameworks."""
    for name in ("parameter_server", "central_storage"):
        registry.add(BindingSpec(name, "torch", "unidist_parameter_server._torch.step:TorchParameterServer"))
        registry.add(BindingSpec(name, "tensorflow", "unidist_parameter_server._keras.step:KerasParameterServer"))
        registry.add(BindingSpec(name, "jax", "unidist_parameter_server._jax.step:JaxParameterServer"))
