"""Observers of jobs: a kind of plugins that this package adds to those of the core.

An observer watches a job in its launcher: it may show it, record it, or call somebody. See
`unidist.launcher.JobObserver`. It may bring options of `unidist launch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

import pluggy

from unidist.launcher import JobObserver
from unidist.registry import Registry, load_object
from unidist.runtime.plugin_manager import PluginManager

if TYPE_CHECKING:
    from click import Option

__all__ = ["MakeObserver", "ObserverSpec", "unidist_register_observers"]

hookspec = pluggy.HookspecMarker("unidist")

MakeObserver: TypeAlias = Callable[[Mapping[str, Any], bool, PluginManager], JobObserver | None]
"""Makes the observer of a job, or None if the options ask for none. Called before the job is started.

It is given the values of the spec's options, by parameter name, whether the job is elastic, and the plugins that are
not switched off. It raises `ConfigurationError` if the options contradict each other, or the job.
"""


@dataclass(frozen=True)
class ObserverSpec:
    """An observer of jobs, not yet imported.

    Args:
        name: by which lists name it.
        path: "module:function" of a `MakeObserver`.
        summary: one line for lists.
        options: options that it adds to `unidist launch`, best of the class
            `unidist_launch.display.grouped_help.GroupedOption`, whose heading says where `--help` shows them. Without a
            value on the command line each shall be None.
    """

    kind: ClassVar[str] = "observer"
    hook: ClassVar[str] = "unidist_register_observers"

    name: str
    path: str
    summary: str
    options: tuple[Option, ...] = ()

    def load(self) -> MakeObserver:
        """Import and return the function that makes it."""
        return cast("MakeObserver", load_object(self.path, f"observer {self.name!r}"))


@hookspec
def unidist_register_observers(registry: Registry[ObserverSpec]) -> None:
    """Register observers of jobs. Called by `unidist launch` before it reads its options: be quick."""
