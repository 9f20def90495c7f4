"""The settings of an executor: time limits and network interfaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol


class HostDiscovery(Protocol):
    """Says which of Ray's nodes an elastic job may use."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Return the number of ranks by node, with the names of `RayHostDiscovery`."""


@dataclass
class RaySettings:
    """Settings of a `RayExecutor`; `RayExecutor.create_settings` makes them, as in Horovod.

    Args:
        timeout_s: longest wait of the ranks for each other in `init()`.
        placement_group_timeout_s: longest wait for Ray to find room for all workers.
        nics: network interfaces; each node uses the first of them that it has. None: that by which Ray knows the node.
        discovery: of the nodes of an elastic job, for an executor with `override_discovery=False`.
    """

    timeout_s: float = 120
    placement_group_timeout_s: float = 100
    nics: Sequence[str] | None = None
    discovery: HostDiscovery | None = None

    @property
    def placement_timeout(self) -> timedelta:
        """Longest wait for Ray to find room for all workers."""
        return timedelta(seconds=self.placement_group_timeout_s)
