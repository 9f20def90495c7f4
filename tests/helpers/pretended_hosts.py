"""Ranks of one host as if they were on several, for collectives that go between hosts."""

from __future__ import annotations

from unidist.hierarchical.communicator import HierarchicalCommunicator
from unidist.hierarchical.layout import Layout
from unidist.runtime import context
from unidist.topology import Topology


def pretend(num_hosts: int) -> None:
    """Let this rank be on one of so many hosts, and collectives go between them. Collective."""
    runtime = context.current()
    world = runtime.world.split(range(runtime.world.size))
    assert world is not None
    local = world.size // num_hosts
    runtime.topology = Topology(world.rank, world.size, world.rank % local, local, world.rank // local, num_hosts)
    layout = Layout.of([rank // local for rank in range(world.size)])
    inner = world.split(layout.hosts[layout.host_of(world.rank)])
    assert inner is not None
    made = runtime._communicators
    made._worlds["host"] = made._keep(HierarchicalCommunicator(world, inner, layout))
