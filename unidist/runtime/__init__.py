"""The runtime of a process: the context, its communicators, and the plugin manager.

`context.init()` makes the one `Context`, `current()` finds it, `shutdown()` ends it. Imports all folders below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist._lazy import lazy_names

if TYPE_CHECKING:
    from unidist.runtime import context, hookspecs
    from unidist.runtime.context import Context, current, engine_usable, init, is_initialized, shutdown
    from unidist.runtime.local_rendezvous import LocalRendezvous
    from unidist.runtime.plugin_manager import PluginInfo, PluginManager, hookimpl

__all__ = [
    "Context",
    "LocalRendezvous",
    "PluginInfo",
    "PluginManager",
    "context",
    "current",
    "engine_usable",
    "hookimpl",
    "hookspecs",
    "init",
    "is_initialized",
    "shutdown",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Context": "context",
        "LocalRendezvous": "local_rendezvous",
        "PluginInfo": "plugin_manager",
        "PluginManager": "plugin_manager",
        "context": "",
        "current": "context",
        "engine_usable": "context",
        "hookimpl": "plugin_manager",
        "hookspecs": "",
        "init": "context",
        "is_initialized": "context",
        "shutdown": "context",
    },
)
