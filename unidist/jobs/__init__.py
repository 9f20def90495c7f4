"""The processes of a job on one host: started, watched, and none left behind; what can be checked before they start.

Imports `runtime` and the folders below. `pool/` runs functions as ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.jobs import preflight, sweep
    from unidist.jobs.processes import (
        HostShare,
        LocalProcesses,
        describe_exit,
        free_port,
        parent_death_signal,
        watch_exit,
    )
    from unidist.jobs.spill_file import SpillFolder
    from unidist.jobs.watchdog import ProcessWatchdog

__all__ = [
    "HostShare", "LocalProcesses", "ProcessWatchdog", "SpillFolder", "describe_exit", "free_port",
    "parent_death_signal", "preflight", "sweep", "watch_exit",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "": "preflight sweep",
        "processes": "HostShare LocalProcesses describe_exit free_port parent_death_signal watch_exit",
        "spill_file": "SpillFolder",
        "watchdog": "ProcessWatchdog",
    },
)
