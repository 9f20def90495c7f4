"""Makes the communicator of a process group."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from unidist.communicator import Communicator
from unidist.communicator_capabilities import MakesSubgroups
from unidist.engine import EngineSpec
from unidist.engines import check_same, choose
from unidist.hierarchical import connect_hosts
from unidist.registry import Registry
from unidist.rendezvous import Rendezvous, SingleRendezvous
from unidist.runtime import LocalRendezvous, PluginManager
from unidist.settings import Settings
from unidist.topology import Topology
from unidist_torch_backend.meeting import GroupFacts, GroupJob, GroupMember, check_alive, meet
from unidist_torch_backend.store_rendezvous import StoreRendezvous


@dataclass
class GroupConnection:
    """A communicator, and what ends with it.

    Args:
        communicator: over the members of a process group.
        closing: closes it, and after it the rendezvous of its engine.
        members: who they are; empty where they did not have to tell.
        local_size: how many processes of the job, at least, are on this host.
    """

    communicator: Communicator
    closing: ExitStack
    members: tuple[GroupMember, ...] = ()
    local_size: int = 1

    def close(self) -> None:
        """Close the communicator and its rendezvous. Idempotent."""
        self.closing.close()


def connect(store: Store, rank: int, size: int, timeout: timedelta, job: GroupJob) -> GroupConnection:
    """Connect processes that know a store and nothing else of each other. Collective over them.

    Args:
        store: PyTorch's, for this group alone.
        rank: of this process in the group.
        size: of the group.
        timeout: longest wait for the other members, and of the communicator's operations.
        job: that all of them belong to.

    Raises:
        ConfigurationError: see `meet`; or no engine connects these processes.
        StalledError, PeerLostError: a member did not come, or died.
    """
    if size == 1:
        return _connect_alone(timeout)
    meeting = meet(store, rank, size, timeout, job)
    settings = Settings.read()
    engines = _engines(settings.disabled_plugins)
    topology = meeting.topology
    with ExitStack() as closing:
        choice = choose(settings.engine, "host", topology, engines, tls=settings.tls)
        check_same(choice, meeting.rendezvous, topology, timeout)
        if topology.rank == 0:
            choice.tell()
        place = _meeting_place(meeting, closing, timeout) if topology.single_host else meeting.rendezvous
        made = choice.spec.load().connect(topology, place, timeout=timeout)
        closing.callback(made.close)
        if settings.hierarchical and not topology.single_host:
            made, here = connect_hosts(
                made,
                topology,
                meeting.rendezvous,
                meet_on_host=lambda: _meet_on_host(meeting, timeout),
                engines=engines,
                timeout=timeout,
            )
            if here is not None:
                closing.callback(here.close)
            closing.callback(made.close)
        return GroupConnection(made, closing.pop_all(), meeting.members, topology.local_size)


def _connect_alone(timeout: timedelta) -> GroupConnection:
    """Return a group of this process."""
    from unidist.engines import SingleEngine

    return GroupConnection(SingleEngine().connect(Topology(), SingleRendezvous(), timeout=timeout), ExitStack())


def connect_members(
    parent: GroupConnection, ranks: tuple[int, ...], store: Store, rank: int, timeout: timedelta
) -> GroupConnection:
    """Make a group of members of a connection. Collective over those alone.

    Args:
        parent: whose communicator `MakesSubgroups`.
        ranks: the members' ranks in it, in their order in the new group.
        store: PyTorch's, for the new group alone.
        rank: of this process in the new group.
        timeout: longest wait for the others, and of the new communicator's operations.

    Raises:
        StalledError, PeerLostError: a member did not come, or died.
    """
    assert isinstance(parent.communicator, MakesSubgroups), "asked by the caller"
    number = store.add(f"meetings/{rank}", 1)  # a group that was destroyed may be made again in the same store
    members = parent.members
    rendezvous = StoreRendezvous(
        PrefixStore(f"members/{number}", store),
        rank,
        len(ranks),
        check=lambda missing: check_alive(members, [ranks[each] for each in missing]) if members else None,
    )
    made = parent.communicator.subgroup(ranks, rendezvous, timeout=timeout)
    closing = ExitStack()
    closing.callback(made.close)
    return GroupConnection(made, closing, tuple(members[each] for each in ranks) if members else (), parent.local_size)


@functools.cache  # to look at what is installed takes longer than to connect, and groups may be formed again and again
def _engines(disabled_plugins: frozenset[str]) -> Registry[EngineSpec]:
    return PluginManager(disabled_plugins).load().engines


def _meeting_place(meeting: GroupFacts, closing: ExitStack, timeout: timedelta) -> Rendezvous:
    """Return a rendezvous of members that are all on one host: it passes descriptors, and notices who dies."""
    place = _meet_on_host(meeting, timeout)
    closing.callback(place.close)
    return place


def _meet_on_host(meeting: GroupFacts, timeout: timedelta) -> Rendezvous:
    topology = meeting.topology
    if topology.local_size == 1:
        return SingleRendezvous()
    return LocalRendezvous(
        rank=topology.local_rank,
        world_size=topology.local_size,
        key=f"{meeting.secret.hex()}/{topology.node_rank}",
        secret=meeting.secret,
        timeout=timeout,
    )
