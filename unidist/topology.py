"""The place of a process in its job."""

from __future__ import annotations

from dataclasses import dataclass

from unidist.errors import ConfigurationError

__all__ = [
    "Topology",
]


@dataclass(frozen=True)
class Topology:
    """The place of one process among all.

    Args:
        rank: index of this process, 0 to world_size - 1.
        world_size: number of processes.
        local_rank: index among the processes of this host.
        local_size: number of processes on this host.
        node_rank: index of this host (Horovod calls it cross_rank).
        num_nodes: number of hosts (Horovod's cross_size).
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1

    def __post_init__(self) -> None:
        for index, size in (("rank", "world_size"), ("local_rank", "local_size"), ("node_rank", "num_nodes")):
            i, n = getattr(self, index), getattr(self, size)
            if n < 1 or not 0 <= i < n:
                raise ConfigurationError(
                    f"{index}={i} with {size}={n}: a rank is at least 0 and below its size. "
                    "Check the environment that started this process (`unidist doctor` shows it)."
                )

    @property
    def single_host(self) -> bool:
        """True when all processes run on this host."""
        return self.local_size == self.world_size
