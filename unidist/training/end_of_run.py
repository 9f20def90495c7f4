"""Says at the end of a run what it never did, as it was too short: an update, or a synchronization."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from unidist.waits import has_raised

if TYPE_CHECKING:
    import weakref

    from unidist.optim.accumulation import Window
    from unidist.optim.update import Update
    from unidist.runtime_api import RuntimeAPI

__all__ = ["EndOfRun", "never_applied", "never_complete"]

_log = logging.getLogger(__name__)


class EndOfRun:
    """Questions for the end of a run, whose runtime owns this.

    Args:
        context: the runtime. Its rank 0 warns.
    """

    def __init__(self, context: RuntimeAPI) -> None:
        self._warns = context.topology.rank == 0
        self._problems: list[Callable[[], str]] = []

    def watch(self, problem: Callable[[], str]) -> None:
        """Ask this at the end.

        Args:
            problem: returns a sentence about what is wrong, or "".
        """
        self._problems.append(problem)

    def close(self) -> None:
        """Warn of what is wrong. A script that has failed has said why."""
        failed = has_raised() or sys.exc_info()[1] is not None
        for problem in self._problems if self._warns and not failed else ():
            if found := problem():
                _log.warning("%s", found)


def never_complete(window: Window) -> str:
    """Return a sentence about a window that has passes and was never complete; "" for another one."""
    passes, made = window.accumulation.passes, window.num_steps_in_all
    if window.was_complete or not window.accumulation.stepwise or not made:
        return ""
    return (
        f"accumulate={passes}: the run ends after {made} backward passes with step(), and an update takes {passes}, so "
        f"no parameter was ever updated. Give accumulate={made} or less, or call optimizer.flush() at the end of an "
        "epoch"
    )


def never_applied(reference: weakref.ref[Update]) -> str:
    """Return a sentence about an optimizer that has got reduced gradients and never made a step; "" for another one.

    Args:
        reference: to its update, which may be gone.
    """
    update = reference()
    if update is None or update.step or not (update.window.finished or update.window.in_round):
        return ""
    return (
        "the optimizer that was distributed has never made a step, though gradients of its parameters were exchanged. "
        "If another optimizer has updated them, one that was made before distribute() or again after it, its updates "
        "may not be those of one process: let the one step that distribute() has returned"
    )
