"""Registers what elastic training adds to a rank: it shows its stacks when asked to, and tells of its steps."""

from __future__ import annotations

import faulthandler
import signal
from typing import TYPE_CHECKING

from unidist.runtime.plugin_manager import hookimpl

if TYPE_CHECKING:
    from unidist.runtime.context import Context

STACKS_SIGNAL = signal.SIGUSR2
"""The launcher sends it to a rank that hangs, before it ends it."""


@hookimpl
def unidist_initialized(context: Context) -> None:
    """Write the stacks of all threads to standard error on a signal, also while something holds Python's lock.

    A script that uses this signal itself keeps its handler.
    """
    if context.membership is not None and signal.getsignal(STACKS_SIGNAL) == signal.SIG_DFL:
        faulthandler.register(STACKS_SIGNAL, all_threads=True, chain=False)


@hookimpl
def unidist_step_applied(context: Context, step: int) -> None:
    """Let the coordinator see that this rank gets on, between its commits too."""
    if context.membership is not None:
        context.membership.link.step()
        context.membership.link.pace.update()
