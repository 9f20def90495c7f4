"""Puts an engine that connects hosts on top of the engine inside each host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta

from unidist.communicator import Communicator
from unidist.engine import EngineSpec
from unidist.engines import choice as engine_choice
from unidist.hierarchical.communicator import HierarchicalCommunicator
from unidist.hierarchical.layout import Layout
from unidist.registry import Registry
from unidist.rendezvous import Rendezvous
from unidist.topology import Topology

_log = logging.getLogger("unidist.engine")


def connect_hosts(
    outer: Communicator,
    topology: Topology,
    rendezvous: Rendezvous,
    *,
    meet_on_host: Callable[[], Rendezvous],
    engines: Registry[EngineSpec],
    timeout: timedelta,
) -> tuple[Communicator, Rendezvous | None]:
    """Return a communicator that uses `outer` between hosts only. Collective.

    Args:
        outer: over all ranks.
        topology: this process's place.
        rendezvous: of all ranks.
        meet_on_host: makes a rendezvous of the ranks of this host.
        engines: what is registered; the one inside a host is chosen as for a job that has this host alone.
        timeout: longest wait for the other ranks.

    Returns:
        The communicator, and the rendezvous of this host, to be closed after it. `outer` itself and None where no
        host has several ranks.
    """
    replies = rendezvous.allgather(str(topology.node_rank).encode(), timeout=timeout)
    layout = Layout.of([int(item.payload) for item in replies])
    if len(layout.hosts) in (1, outer.size):
        return outer, None
    here = Topology(topology.local_rank, topology.local_size, topology.local_rank, topology.local_size)
    meeting = meet_on_host()
    try:
        choice = engine_choice.choose(engine_choice.AUTO, "host", here, engines)
        engine_choice.check_same(choice, meeting, here, timeout)
        inner = choice.spec.load().connect(here, meeting, timeout=outer.timeout)
    except BaseException:
        meeting.close()
        raise
    made = HierarchicalCommunicator(outer, inner, layout)
    if topology.rank == 0:
        _log.info("collectives are hierarchical: %s", made.description)
    return made, meeting
