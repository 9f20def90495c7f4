"""The processes of a job on one host: started, watched, and none left behind; what can be checked before they start.

`ClusterRank` is for processes that somebody else has started.

Imports `runtime`, `horovod_imports` and the folders below. `pool/` runs functions as ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.jobs import preflight, sweep, tf_config
    from unidist.jobs.cluster_rank import ClusterRank, rank_order
    from unidist.jobs.liveness import Beats, StopWatch, beat_for_launcher
    from unidist.jobs.network import interface_address, is_loopback
    from unidist.jobs.processes import (
        HostShare,
        LocalProcesses,
        describe_exit,
        free_port,
        free_ports,
        parent_death_signal,
        sealed_secret,
        watch_exit,
    )
    from unidist.jobs.program import open_standard_streams, run_program
    from unidist.jobs.side_processes import SideProcesses
    from unidist.jobs.spill_file import SpillFolder
    from unidist.jobs.watchdog import ProcessWatchdog

__all__ = [
    "Beats", "ClusterRank", "HostShare", "LocalProcesses", "ProcessWatchdog", "SideProcesses", "SpillFolder",
    "StopWatch", "beat_for_launcher", "describe_exit", "free_port", "free_ports", "interface_address", "is_loopback",
    "open_standard_streams", "parent_death_signal", "preflight", "rank_order", "run_program", "sealed_secret",
    "sweep", "tf_config", "watch_exit",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "": "preflight sweep tf_config",
        "cluster_rank": "ClusterRank rank_order",
        "liveness": "Beats StopWatch beat_for_launcher",
        "network": "interface_address is_loopback",
        "processes": (
            "HostShare LocalProcesses describe_exit free_port free_ports parent_death_signal sealed_secret watch_exit"
        ),
        "program": "open_standard_streams run_program",
        "side_processes": "SideProcesses",
        "spill_file": "SpillFolder",
        "watchdog": "ProcessWatchdog",
    },
)
