"""The processes of a job on one host: started, watched, and none left behind; what can be checked before they start.

Imports `runtime` and the folders below. `pool/` runs functions as ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist._lazy import lazy_names

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
    "HostShare",
    "LocalProcesses",
    "ProcessWatchdog",
    "describe_exit",
    "free_port",
    "parent_death_signal",
    "preflight",
    "sweep",
    "SpillFolder",
    "watch_exit",
]

__getattr__ = lazy_names(
    __name__,
    {
        "HostShare": "processes",
        "LocalProcesses": "processes",
        "ProcessWatchdog": "watchdog",
        "describe_exit": "processes",
        "free_port": "processes",
        "parent_death_signal": "processes",
        "preflight": "",
        "sweep": "",
        "SpillFolder": "spill_file",
        "watch_exit": "processes",
    },
)
