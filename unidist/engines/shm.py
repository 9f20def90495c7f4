"""The shm engine: collectives over memory that all ranks of a host share.

The data path is C (`shm_native/`, module `_shm`). `_arena.py` and `_host.py` hold the memory, `_shm_communicator.py`
is one group of ranks on it. Importing this module needs no C kernels: without them the engine says so.
"""

from __future__ import annotations

import os
import struct
from datetime import timedelta

from unidist.communicator import Communicator
from unidist.engine import Availability, Engine
from unidist.rendezvous import Rendezvous
from unidist.settings.environment import Settings
from unidist.topology import Topology

MAX_RANKS = 512  # the counts of an all-to-all, two per rank, travel in one small payload
_OFFSET = struct.Struct("!Q")  # of a rank's slot


class ShmEngine(Engine):
    """Connects the processes of one host."""

    def availability(self) -> Availability:
        """Usable on Linux where the C kernels were built."""
        try:
            from unidist.engines import _shm  # noqa: F401 - only whether it can be imported
        except ImportError as exc:
            return Availability(
                False, f"the C kernels are not built ({exc}); reinstall unidist-train with a C compiler"
            )
        if not hasattr(os, "memfd_create"):
            return Availability(False, "needs Linux's memfd_create")
        return Availability(True, "built in")

    def supports(self, topology: Topology) -> Availability:
        """All ranks on one host."""
        if not topology.single_host:
            return Availability(False, f"connects one host; this job has {topology.num_nodes}")
        if topology.world_size > MAX_RANKS:
            return Availability(False, f"connects at most {MAX_RANKS} ranks")
        return Availability(True)

    def connect(self, topology: Topology, rendezvous: Rendezvous, *, timeout: timedelta) -> Communicator:
        """Map everyone's engine memory and return the world communicator."""
        from unidist.engines._host import HostMemory, SharedHost
        from unidist.engines._shm_communicator import ShmCommunicator

        settings = Settings.read()
        host = HostMemory(
            topology.rank,
            topology.world_size,
            rendezvous,
            capacity=settings.shm_capacity_bytes,
            timeout=timeout,
        )
        shared = SharedHost(host, settings.shm_staging_bytes)
        slot = shared.allocate_slot(topology.world_size)
        try:
            answers = rendezvous.allgather(_OFFSET.pack(slot.offset), timeout=timeout)
        except BaseException:
            host.close()
            raise
        (offsets,) = zip(*(_OFFSET.unpack(item.payload) for item in answers), strict=True)
        return ShmCommunicator(
            shared,
            topology.rank,
            tuple(range(topology.world_size)),
            slot,
            offsets,
            timeout,
        )
