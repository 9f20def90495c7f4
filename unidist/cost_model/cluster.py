"""The machines: what a rank computes in a second, what it has of memory, and how fast ranks reach each other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from unidist.cost_model.collectives import Link, fastest
from unidist.cost_model.step import Operation
from unidist.errors import ConfigurationError
from unidist.mesh import Mesh


@dataclass(frozen=True)
class Cluster:
    """Equal hosts.

    Args:
        flops: floating-point operations in a second that a rank reaches in large matrix products.
        ranks_per_host: ranks on each host; neighbours in rank order.
        inside: between two ranks of a host, while all others of the host communicate too.
        between: between two hosts: the bandwidth is that of the host, which its ranks share.
        messages: between two ranks of a host, for single messages, where it was measured apart; None: as `inside`.
        memory_bytes: what a rank has; None: not limited.
        memory_bandwidth: bytes in a second that a rank reads or writes; None: not counted.
        overlap: the part of an exchange that can go on while the rank computes, where a strategy lets it. 1 for an
            accelerator whose copies cost it nothing, 0 where the same cores compute and communicate.
    """

    flops: float
    ranks_per_host: int
    inside: Link
    between: Link
    messages: Link | None = None
    memory_bytes: float | None = None
    memory_bandwidth: float | None = None
    overlap: float = 1.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("flops", "ranks_per_host", "memory_bytes", "memory_bandwidth"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"a cluster with {name}={value:g}: give a number above 0")
        if not 0 <= self.overlap <= 1:
            raise ConfigurationError(f"a cluster with overlap={self.overlap:g}: it is a part, from 0 to 1")

    def group(self, mesh: Mesh, axis: str) -> Group:
        """Return how the ranks along an axis of the mesh lie on the hosts."""
        names = list(mesh.axes)
        if axis not in mesh.axes:
            return Group(1, 1)
        if mesh.world_size <= self.ranks_per_host:
            return Group(mesh.size(axis), 1)
        stride = math.prod(mesh.axes[name] for name in names[names.index(axis) + 1 :])
        return Group.along(mesh.size(axis), stride, self.ranks_per_host)

    def seconds(self, operation: Operation, num_bytes: float, group: Group) -> float:
        """Return the time of a collective, by the fastest algorithm on each level.

        Over several hosts it has two levels, as `unidist.hierarchical` does it: inside of each host, and between hosts
        with each rank's part. A link between hosts is shared by all ranks of the host, since the groups of all of
        them communicate at the same time.

        Args:
            operation: which.
            num_bytes: the whole: what is given to a reduce-scatter, what comes out of an all-gather.
            group: from `group`.
        """
        return _seconds(self, operation, num_bytes, group)

    def _inside(self, operation: Operation, num_bytes: float, num_ranks: int) -> float:
        link = self.messages if self.messages is not None and operation == "sendrecv" else self.inside
        return fastest(operation, num_ranks, num_bytes, link)[1]

    def _between(self, operation: Operation, num_bytes: float, num_hosts: int) -> float:
        # A rank's own share of the host's link.
        share = Link(self.between.latency, self.between.bandwidth / self.ranks_per_host, self.between.reduction)
        return fastest(operation, num_hosts, num_bytes, share)[1]


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other: `hosts` times `per_host` of them."""

    per_host: int
    hosts: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.per_host * self.hosts

    @classmethod
    def along(cls, size: int, stride: int, ranks_per_host: int) -> Group:
        """Return the group of ranks 0, stride, 2 stride, ...; where hosts cut it unevenly, into equal smaller parts."""
        per_host = math.gcd(size, max(1, ranks_per_host // stride))
        return cls(per_host, size // per_host)


@lru_cache(maxsize=65536)
def _seconds(cluster: Cluster, operation: Operation, num_bytes: float, group: Group) -> float:
    if group.hosts == 1:
        return cluster._inside(operation, num_bytes, group.per_host)
    if group.per_host == 1:
        return cluster._between(operation, num_bytes, group.hosts)
    part = num_bytes / group.per_host
    match operation:
        case "allreduce":
            return (
                cluster._inside("reducescatter", num_bytes, group.per_host)
                + cluster._between("allreduce", part, group.hosts)
                + cluster._inside("allgather", num_bytes, group.per_host)
            )
        case "reducescatter" | "allgather":
            return cluster._inside(operation, num_bytes, group.per_host) + cluster._between(
                operation, part, group.hosts
            )
        case "broadcast":
            return cluster._between(operation, num_bytes, group.hosts) + cluster._inside(
                operation, num_bytes, group.per_host
            )
        case "sendrecv":  # neighbours: the slowest of the pairs crosses hosts
            return cluster._between(operation, num_bytes, 2)
