"""The agent: the process on each host of a job that starts the ranks there and passes on what they print.

An agent gets its order by a variable or on standard input (`AgentOrder`), and speaks with the launcher over the
control connection. Imports `output` and `side_processes` alone of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_launch.agent import agent
    from unidist_launch.agent.order import ORDER_VARIABLE, AgentOrder

__all__ = [
    "AgentOrder", "ORDER_VARIABLE", "agent",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "": "agent",
        "order": "AgentOrder ORDER_VARIABLE",
    },
)
