"""Jobs whose ranks are started by agents, a fixed number on known hosts.

`RemoteRun` is the loop; an `AgentStarter` says how agents are started, by ssh or by a scheduler. Also the end of a
job: signals, grace periods, and the rank to blame. Imports `agent`, `observation`, `options`,
`output` and `side_processes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_launch.remote.hosts import AgentStarter, LocalAgents, Reasons, agent_command, meaning_of
    from unidist_launch.remote.run import RemoteRun

__all__ = [
    "AgentStarter", "LocalAgents", "Reasons", "RemoteRun", "agent_command", "meaning_of",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "hosts": "AgentStarter LocalAgents Reasons agent_command meaning_of",
        "run": "RemoteRun",
    },
)
