"""The machines: what a rank computes in a second, what it has of memory, and how fast ranks reach each other."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from unidist.cost_model.collectives import Link, cost, fastest
from unidist.cost_model.efficiency import BETWEEN_HOSTS, WHOLE, Efficiency
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
        attention_flops: the rate in the products of attention, which are small or wait for memory; None: as `flops`.
        product_overhead: seconds that each matrix product takes in addition to its arithmetic: starting it, and the
            time in which it does not fill the device.
        efficiency_inside: the part of the bandwidth of `inside` that collectives reach, by their size.
        efficiency_between: likewise between hosts. The default is `efficiency.PUBLISHED`, a constant.
        rings: gathers and reduce-scatters over several hosts go around one ring of all ranks, with p - 1 latencies, as
            those of NCCL do, and large all-reduces too. False: the fastest of `unidist.algorithms` on two levels.
    """

    flops: float
    ranks_per_host: int
    inside: Link
    between: Link
    messages: Link | None = None
    memory_bytes: float | None = None
    memory_bandwidth: float | None = None
    overlap: float = 1.0
    attention_flops: float | None = None
    product_overhead: float = 0.0
    efficiency_inside: Efficiency = WHOLE
    efficiency_between: Efficiency = BETWEEN_HOSTS
    rings: bool = True
    _known: dict[tuple[Operation, float, Group, int], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 0 <= self.product_overhead < math.inf:
            raise ConfigurationError(f"a cluster with product_overhead={self.product_overhead:g}: give 0 or more")
        for name in ("flops", "ranks_per_host", "memory_bytes", "memory_bandwidth", "attention_flops"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"a cluster with {name}={value:g}: give a number above 0")
        if not 0 <= self.overlap <= 1:
            raise ConfigurationError(f"a cluster with overlap={self.overlap:g}: it is a part, from 0 to 1")

    def group(self, mesh: Mesh, axis: str) -> Group:
        """Return how the ranks along an axis of the mesh, or a composite one, lie on the hosts."""
        size = mesh.size(axis)
        if mesh.world_size <= self.ranks_per_host:
            return Group(size, 1)
        members, stride, per_host = mesh.members(axis), mesh.world_size, 1
        for name, along in mesh.axes.items():
            stride //= along
            if name in members:
                per_host *= Group.along(along, stride, self.ranks_per_host).per_host
        return Group(per_host, size // per_host)

    def seconds(self, operation: Operation, num_bytes: float, group: Group, *, servers: int = 0) -> float:
        """Return the time of a collective, by the fastest algorithm on each level.

        Over several hosts it has two levels, as `unidist.hierarchical` does it: inside of each host, and between hosts
        with each rank's part. A link between hosts is shared by all ranks of the host, since the groups of all of
        them communicate at the same time.

        Args:
            operation: which.
            num_bytes: the whole: what is given to a reduce-scatter, what comes out of an all-gather.
            group: from `group`.
            servers: of a push and a fetch.
        """
        asked = operation, num_bytes, group, servers
        found = self._known.get(asked)
        if found is None:  # a search asks for the same ones thousands of times
            if operation in ("push", "fetch"):
                found = self._served(num_bytes, group, servers)
            else:
                found = _seconds(self, operation, num_bytes, group)
            self._known[asked] = found
        return found

    def _inside(self, operation: Operation, num_bytes: float, num_ranks: int) -> float:
        link = self.messages if self.messages is not None and operation == "sendrecv" else self.inside
        reached = self.efficiency_inside.at(num_bytes)
        return fastest(operation, num_ranks, num_bytes, _slower(link, reached))[1]

    def _between(self, operation: Operation, num_bytes: float, num_hosts: int, whole: float | None = None) -> float:
        # A rank's own share of the host's link.
        reached = self.efficiency_between.at(num_bytes if whole is None else whole) / self.ranks_per_host
        return fastest(operation, num_hosts, num_bytes, _slower(self.between, reached))[1]

    def _served(self, num_bytes: float, group: Group, servers: int) -> float:
        """Return the time in which all ranks give everything to servers, or get it: links are as fast both ways.

        The busiest link bounds it: that of a host whose ranks send most, or of one whose servers receive most. Servers
        are spread over the hosts of the ranks, and what stays on a host takes none of its link.
        """
        if group.hosts == 1:
            link = self.messages or self.inside
            most = max(1.0, group.size / servers) * num_bytes
            return link.latency + most / (link.bandwidth * self.efficiency_inside.at(num_bytes))
        fewest, more = divmod(servers, group.hosts)
        sent = group.per_host * num_bytes * (1 - fewest / servers)
        received = (group.size - group.per_host) * num_bytes * (fewest + bool(more)) / servers
        bandwidth = self.between.bandwidth * self.efficiency_between.at(num_bytes)
        return self.between.latency + max(sent, received) / bandwidth

    def _ring(self, operation: Operation, num_bytes: float, group: Group) -> float:
        """Return the time of a ring through all hosts: each link passes p - 1 messages, the slowest one bounds it."""
        inside, between = self.efficiency_inside.at(num_bytes), self.efficiency_between.at(num_bytes)
        share = self.between.bandwidth * between * group.per_host / self.ranks_per_host
        bandwidth = share if group.per_host == 1 else min(share, self.inside.bandwidth * inside)
        slowest = Link(max(self.between.latency, self.inside.latency), bandwidth, self.between.reduction)
        return cost(operation, "ring", group.size).seconds(num_bytes, slowest)


class Group(NamedTuple):
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


def _seconds(cluster: Cluster, operation: Operation, num_bytes: float, group: Group) -> float:
    if group.hosts == 1:
        return cluster._inside(operation, num_bytes, group.per_host)
    if cluster.rings and operation in ("reducescatter", "allgather"):
        return cluster._ring(operation, num_bytes, group)
    if cluster.rings and operation == "allreduce":  # NCCL has a tree too, which costs about as much as two levels
        return min(cluster._ring(operation, num_bytes, group), _two_levels(cluster, operation, num_bytes, group))
    return _two_levels(cluster, operation, num_bytes, group)


def _two_levels(cluster: Cluster, operation: Operation, num_bytes: float, group: Group) -> float:
    part = num_bytes / group.per_host
    match operation:
        case "allreduce":
            return (
                cluster._inside("reducescatter", num_bytes, group.per_host)
                + cluster._between("allreduce", part, group.hosts, num_bytes)
                + cluster._inside("allgather", num_bytes, group.per_host)
            )
        case "reducescatter" | "allgather":
            return cluster._inside(operation, num_bytes, group.per_host) + cluster._between(
                operation, part, group.hosts, num_bytes
            )
        case "alltoall":  # what stays on the host and what leaves it go on at the same time
            leaving = num_bytes * (group.hosts - 1) / group.hosts
            return max(
                cluster._inside(operation, num_bytes - leaving, group.per_host),
                cluster._between(operation, leaving * group.hosts / (group.hosts - 1), group.hosts),
            )
        case "broadcast":
            return cluster._between(operation, num_bytes, group.hosts) + cluster._inside(
                operation, num_bytes, group.per_host
            )
        case "sendrecv":  # neighbours: the slowest of the pairs crosses hosts
            return cluster._between(operation, num_bytes, 2)
        case "push" | "fetch":
            raise AssertionError(f"a {operation} goes to servers")


def _slower(link: Link, factor: float) -> Link:
    return link if factor == 1.0 else Link(link.latency, link.bandwidth * factor, link.reduction)
