"""Hierarchical collectives against the contract of communicators: two "hosts" that are halves of one."""

from __future__ import annotations

import re

import pytest

from unidist.communicator import Communicator
from unidist.communicator_capabilities import SharesMemory
from unidist.errors import ConfigurationError
from unidist.hierarchical import HierarchicalCommunicator
from unidist.hierarchical.layout import Layout
from unidist.testing import CommunicatorConformance

pytestmark = pytest.mark.parallel


def over_hosts(outer: Communicator, host_of: list[int]) -> Communicator:
    """Return a communicator over hosts that the test makes up; a rank's inner engine is a split of the outer one."""
    layout = Layout.of(host_of)
    inner = outer.split(layout.hosts[layout.host_of(outer.rank)])
    assert inner is not None
    return HierarchicalCommunicator(outer, inner, layout, direct_bytes=-1)  # -1: empty operations and barriers too


class _Hierarchical(CommunicatorConformance):
    engine = "shm"
    detects_mismatch = False
    names_missing_ranks = False  # a stage knows who is missing in it only
    names_lost_ranks = False  # a rank that gave up because of the lost one may be named
    abort_carries_reason = False
    life_cycles = 8
    seeds = (1,)


class TestHalves(_Hierarchical):
    sizes = (4,)

    @staticmethod
    def wrap(communicator: Communicator) -> Communicator:
        return over_hosts(communicator, [rank * 2 // communicator.size for rank in range(communicator.size)])


@pytest.mark.soak
class TestHalvesOverTcp(TestHalves):
    """The engine between hosts moves by itself, the one inside by who waits."""

    engine = "tcp"


class TestInsideOfAHost(_Hierarchical):
    """A group of ranks of one host: what it shares."""

    sizes = (4,)
    shares_memory = True

    for _name in dir(_Hierarchical):
        if _name.startswith("test_") and "shar" not in _name:
            locals()[_name] = None

    @staticmethod
    def wrap(communicator: Communicator) -> Communicator:
        hosts = over_hosts(communicator, [rank * 2 // communicator.size for rank in range(communicator.size)])
        assert isinstance(hosts, SharesMemory)
        assert hosts.sharing_obstacle() == "its ranks are on 2 hosts, which have no memory in common"
        with pytest.raises(ConfigurationError, match=r"ranks cannot share memory .* on 2 hosts"):
            hosts.allocate_shared(1)
        first = hosts.rank // 2 * 2
        inside = hosts.split([first, first + 1])
        assert isinstance(inside, HierarchicalCommunicator)
        inside._parts.insert(0, hosts)  # closed with it, after the rest
        return inside


_OF_LAYOUT = re.compile("broadcast|allgather|reducescatter|splits_of|reverse|random|allreduce_gives|barrier")


class TestUnevenAndAlternating(_Hierarchical):
    """What depends on the layout; the rest is the same code."""

    sizes = (3,)

    for _name in dir(_Hierarchical):
        if _name.startswith("test_") and not _OF_LAYOUT.search(_name):
            locals()[_name] = None

    @staticmethod
    def wrap(communicator: Communicator) -> Communicator:
        return over_hosts(communicator, [rank % 2 for rank in range(communicator.size)])
