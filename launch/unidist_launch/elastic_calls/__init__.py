"""Functions as elastic jobs on clusters that start processes by themselves, as Ray and Spark do.

`job` runs the launcher and makes results of the answers, `agent` runs the agent of a host in a process of the
cluster's, and `rank` is the program of a rank. Imports `agent`, `elastic_job` and `remote`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_launch.elastic_calls.agent import CallAgents, run_agent
    from unidist_launch.elastic_calls.job import EndedCall, call_command, results_of, run_call
    from unidist_launch.elastic_calls.rank import call_folder

__all__ = ["CallAgents", "EndedCall", "call_command", "call_folder", "results_of", "run_agent", "run_call"]

__getattr__ = lazy_names(
    __name__,
    {"agent": "CallAgents run_agent", "job": "EndedCall call_command results_of run_call", "rank": "call_folder"},
)
