"""The plugin of the JAX adapter: registers its framework. Imports no jax."""

from __future__ import annotations

from unidist import hookimpl
from unidist.framework import FrameworkSpec
from unidist.registry import Registry


@hookimpl
def unidist_register_frameworks(registry: Registry[FrameworkSpec]) -> None:
    """Register `jax`."""
    registry.add(
        FrameworkSpec(
            "jax",
            "unidist_jax.framework:JaxFramework",
            "jax",
            "JAX, with optimizers of optax or Keras 3",
            conformance="unidist_jax.training.conformance",
            keras="unidist_jax.keras.facade",
        )
    )
