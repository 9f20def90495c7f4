"""Says at the end of a run that an optimizer has never updated anything: its windows are longer than the run."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unidist.optim.accumulation import Window
    from unidist.runtime_api import RuntimeAPI

_log = logging.getLogger(__name__)


class UnfinishedWindows:
    """The windows of the optimizers of a runtime, which owns this.

    Args:
        context: the runtime. Its rank 0 warns.
    """

    def __init__(self, context: RuntimeAPI) -> None:
        self._warns = context.topology.rank == 0
        self._windows: list[Window] = []

    def watch(self, window: Window) -> None:
        """Look at this window at the end."""
        self._windows.append(window)

    def close(self) -> None:
        """Warn of windows of which none was ever complete. A script that has failed has said why."""
        failed = getattr(sys, "last_value", None) is not None or sys.exc_info()[1] is not None
        for window in self._windows if self._warns and not failed else ():
            found = problem(window)
            if found:
                _log.warning("%s", found)


def problem(window: Window) -> str:
    """Return a sentence about a window that has passes and was never complete; "" for another one."""
    passes, made = window.accumulation.passes, window.num_steps_in_all
    if window.was_complete or not window.accumulation.stepwise or not made:
        return ""
    return (
        f"accumulate={passes}: the run ends after {made} backward passes with step(), and an update takes {passes}, so "
        f"no parameter was ever updated. Give accumulate={made} or less, or call optimizer.flush() at the end of an "
        "epoch"
    )
