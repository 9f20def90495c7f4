"""unidist: spread a training script over many processes, with any framework, engine and strategy.

This package is the core and imports no framework. Scripts use a facade, `import unidist.torch as ud`; plugins use the
names below. The modules here are contracts and plain data; each folder is a machine, and its `__init__` lists what is
public of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

installation_is_ours = True  # before the first import: `unidist.installation` looks for it

from unidist.lazy import lazy_names  # noqa: E402

if TYPE_CHECKING:
    from unidist import (
        algorithms,
        buffer,
        builtin,
        checkpoint,
        communicator,
        communicator_capabilities,
        control,
        cost_model,
        elastic,
        engine,
        engines,
        errors,
        facade,
        framework,
        gradients,
        hierarchical,
        horovod_api,
        horovod_imports,
        installation,
        jobs,
        launcher,
        lazy,
        mesh,
        mixins,
        negotiation,
        optim,
        options,
        registry,
        rendezvous,
        runtime,
        runtime_api,
        settings,
        strategy,
        testing,
        timeline,
        topology,
        training,
    )
    from unidist._version import __version__
    from unidist.horovod_imports.hook import as_horovod
    from unidist.jobs.pool.pool import run
    from unidist.runtime.plugin_manager import hookimpl

__all__ = [
    "__version__", "algorithms", "as_horovod", "buffer", "builtin", "checkpoint", "communicator",
    "communicator_capabilities", "control", "cost_model", "elastic", "engine", "engines", "errors", "facade",
    "framework", "gradients", "hierarchical", "hookimpl", "horovod_api", "horovod_imports", "installation", "jobs",
    "launcher", "lazy", "mesh", "mixins", "negotiation", "optim", "options", "registry", "rendezvous", "run", "runtime",
    "runtime_api", "settings", "strategy", "testing", "timeline", "topology", "training",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "": (
            "algorithms buffer builtin checkpoint communicator communicator_capabilities control cost_model "
            "elastic engine engines errors facade framework gradients hierarchical horovod_api horovod_imports "
            "installation jobs launcher lazy mesh mixins negotiation optim options registry rendezvous runtime "
            "runtime_api settings strategy testing timeline topology training"
        ),
        "_version": "__version__",
        "horovod_imports.hook": "as_horovod",
        "jobs.pool.pool": "run",
        "runtime.plugin_manager": "hookimpl",
    },
)
