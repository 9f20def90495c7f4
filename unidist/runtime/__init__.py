"""The runtime of a process: the context, its communicators, and the plugin manager.

`context.init()` makes the one `Context`, `current()` finds it, `shutdown()` ends it. Imports all folders below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.runtime import context, hookspecs
    from unidist.runtime.context import Context, begin_job, current, engine_usable, init, is_initialized, shutdown
    from unidist.runtime.local_rendezvous import LocalRendezvous
    from unidist.runtime.of_context import OfContext
    from unidist.runtime.package_versions import check_package
    from unidist.runtime.plugin_manager import (
        ENTRY_POINT_GROUP,
        PluginInfo,
        PluginManager,
        hookimpl,
    )

__all__ = [
    "ENTRY_POINT_GROUP", "Context", "LocalRendezvous", "OfContext", "PluginInfo", "PluginManager",
    "begin_job", "check_package", "context", "current", "engine_usable", "hookimpl", "hookspecs", "init",
    "is_initialized", "shutdown",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "": "context hookspecs",
        "context": "Context begin_job current engine_usable init is_initialized shutdown",
        "local_rendezvous": "LocalRendezvous",
        "of_context": "OfContext",
        "package_versions": "check_package",
        "plugin_manager": "ENTRY_POINT_GROUP PluginInfo PluginManager hookimpl",
    },
)
