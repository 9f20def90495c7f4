"""The plugin of the JAX adapter: registers its framework and the engine `xla`. Imports no jax."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from unidist import hookimpl
from unidist.engine import EngineSpec
from unidist.engines.choice import AUTO
from unidist.framework import FrameworkSpec
from unidist.registry import Registry, load_object

if TYPE_CHECKING:
    from unidist.runtime.context import Context

XLA = "xla"


@hookimpl
def unidist_register_engines(registry: Registry[EngineSpec]) -> None:
    """Register `xla`, beside the engine that moves host memory: for a script in JAX on GPUs, or if it is named."""
    registry.add(
        EngineSpec(
            XLA,
            "unidist_jax.xla_engine:XlaEngine",
            "collectives of XLA within programs of JAX (ud.spmd, TrainStep); never run on a TPU",
            memory_kinds=frozenset((XLA,)),
            priority=-1,
        )
    )


@hookimpl
def unidist_initialized(context: Context) -> None:
    """Choose this rank's GPU, if the script trains with JAX; with engine `xla`, let the job be one system of JAX."""
    basics = sys.modules.get("unidist_jax.basics")
    on_gpu = basics is not None and basics.choose_device(context.topology)
    if context.settings.engine == XLA:
        load_object("unidist_jax.spmd.processes:join_processes", f"engine {XLA!r}")(context)
    elif on_gpu and context.settings.engine == AUTO and not context.is_elastic:
        load_object("unidist_jax.spmd.processes:join_processes_on_gpus", f"engine {XLA!r}")(context)


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
            check="unidist_jax.versions:check_version",
        )
    )
