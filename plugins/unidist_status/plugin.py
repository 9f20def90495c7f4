"""Registers what watches jobs for the status page, the command `unidist top`, and stack dumps on the page's request."""

from __future__ import annotations

import faulthandler
import signal
from typing import TYPE_CHECKING

from unidist import hookimpl
from unidist.registry import Registry
from unidist_launch.command_spec import CommandSpec
from unidist_launch.observers import ObserverSpec

if TYPE_CHECKING:
    from unidist.runtime.context import Context


@hookimpl
def unidist_register_commands(registry: Registry[CommandSpec]) -> None:
    """Register `unidist top`."""
    registry.add(
        CommandSpec("top", "unidist_status.top_command:top", "Show a running job: ranks, hosts, steps, events.")
    )


@hookimpl
def unidist_initialized(context: Context) -> None:
    """Dump the stacks of all threads on SIGUSR2, which the page's button sends, unless the script handles it."""
    if not context.is_elastic and signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:
        faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)


@hookimpl
def unidist_register_observers(registry: Registry[ObserverSpec]) -> None:
    """Register the status page, with its options of `unidist launch`."""
    from unidist_status.options import OPTIONS

    registry.add(ObserverSpec("status", "unidist_status.options:observer", "a web page that shows the job", OPTIONS))
