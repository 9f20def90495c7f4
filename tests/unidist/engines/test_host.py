"""Memory that peers look at stays until this rank has left, in whichever order the collector ends objects."""

from __future__ import annotations

import ctypes
import gc
from datetime import timedelta
from typing import Any

import pytest

from unidist.engines._arena import Allocation
from unidist.engines._host import HostMemory, SharedHost
from unidist.rendezvous import SingleRendezvous

NBYTES = 64


class Group:
    """A group that its members have not all closed."""

    def all_closed(self) -> bool:
        """See `_shm.Group`."""
        return False


class Communicator:
    """As a communicator that nobody closes, in a reference cycle: it leaves when it is collected."""

    def __init__(self, shared: SharedHost, slot: Allocation, looked_at: Allocation, seen: list[bytes]) -> None:
        self.shared, self.slot, self.looked_at, self.seen = shared, slot, looked_at, seen
        self.itself = self
        shared.acquire(slot)

    def __del__(self) -> None:
        self.seen.append(ctypes.string_at(self.looked_at.address, NBYTES))
        group: Any = Group()
        self.shared.release(group, self.slot)


@pytest.mark.parametrize("kind", ["slot", "shared_pages"])
def test_what_peers_look_at_is_there_when_a_collected_communicator_leaves(kind: str) -> None:
    host = HostMemory(0, 1, SingleRendezvous(), capacity=1 << 24, timeout=timedelta(seconds=30))
    shared = SharedHost(host, 1 << 16)
    slot, shared_pages = shared.allocate_slot(2), shared.allocate_shared(NBYTES, 2)
    looked_at = slot if kind == "slot" else shared_pages
    ctypes.memset(looked_at.address, 7, NBYTES)
    seen: list[bytes] = []
    communicator = Communicator(shared, slot, looked_at, seen)
    gc.collect()
    del host, shared, slot, shared_pages, looked_at, communicator
    gc.collect()
    assert seen == [b"\7" * NBYTES]


@pytest.mark.parametrize("size", [1, 64, 65, 511, 512])
def test_a_window_has_room_for_a_share_of_each_rank(size: int) -> None:
    host = HostMemory(0, 1, SingleRendezvous(), capacity=1 << 24, timeout=timedelta(seconds=30))
    window = SharedHost(host, 1).window_bytes(size)
    widest, elements = 16, 64
    assert window // widest // size >= elements  # else an alltoall through windows divides by zero
    assert window % 4096 == 0
    host.close()
