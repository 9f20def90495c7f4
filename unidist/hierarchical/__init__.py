"""Collectives over several hosts with several ranks each: inside the hosts by one engine, between them by another.

`layout` says which rank does what, `pipeline` carries operations out stage by stage, `communicator` makes the stages,
`connecting` puts it on top of an engine. Imports `engines`, `algorithms` and the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.hierarchical.communicator import HierarchicalCommunicator
    from unidist.hierarchical.connecting import connect_hosts

__all__ = [
    "HierarchicalCommunicator", "connect_hosts",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "communicator": "HierarchicalCommunicator",
        "connecting": "connect_hosts",
    },
)
