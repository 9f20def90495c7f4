"""Registers the hooks of an elastic job: stack dumps on request, and progress reports after each step."""

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
    """Dump the stacks of all threads to standard error on a signal, even while something holds Python's lock.

    A script that uses this signal itself keeps its handler.
    """
    if context.membership is not None and signal.getsignal(STACKS_SIGNAL) == signal.SIG_DFL:
        faulthandler.register(STACKS_SIGNAL, all_threads=True, chain=False)


@hookimpl
def unidist_step_applied(context: Context, step: int) -> None:
    """Tell the coordinator that this rank makes progress, even between its commits."""
    if context.membership is not None:
        context.membership.link.step()
        context.membership.link.step_timer.update()
