"""The engines `gloo` and `nccl`: torch.distributed's process groups as communicators.

The groups are made directly, beside whatever the script does with `torch.distributed.init_process_group`: they
use a separate store on a free port, never MASTER_PORT.
"""

from __future__ import annotations

import importlib.util
import struct
from datetime import timedelta

from unidist.communicator import Communicator
from unidist.engine import Availability, Engine
from unidist.rendezvous import Rendezvous
from unidist.topology import Topology

_PORT = struct.Struct("!H")


class GlooEngine(Engine):
    """gloo over TCP. Host memory; CUDA tensors are staged through host memory."""

    def availability(self) -> Availability:
        """Available with torch and its torch.distributed."""
        missing = _torch_missing()
        if missing:
            return Availability(False, missing)
        import torch.distributed

        if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
            return Availability(False, "this build of torch has no gloo; install a build with torch.distributed")
        return Availability(True, f"torch {torch.__version__}")

    def supports(self, topology: Topology) -> Availability:
        """Support any number of ranks on any hosts."""
        return Availability(True)

    def connect(self, topology: Topology, rendezvous: Rendezvous, *, timeout: timedelta) -> Communicator:
        """Make a store on a free port of rank 0, and a group over it."""
        from unidist_torch.engines.gloo import GlooCommunicator

        store = _make_store(topology, rendezvous, timeout)
        return GlooCommunicator(
            store,
            "world",
            topology.rank,
            tuple(range(topology.world_size)),
            timeout,
            device_index=topology.local_rank,
            address=rendezvous.address,
        )


class NcclEngine(Engine):
    """NCCL between GPUs, one GPU per rank (that of the local rank)."""

    def availability(self) -> Availability:
        """Available with torch, NCCL and a GPU."""
        missing = _torch_missing()
        if missing:
            return Availability(False, missing)
        import torch.distributed

        if not torch.cuda.is_available():
            return Availability(False, "no CUDA device is visible to torch")
        if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
            return Availability(False, "this build of torch has no NCCL")
        return Availability(True, f"torch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")

    def supports(self, topology: Topology) -> Availability:
        """Support one rank per GPU of this host."""
        if not _torch_missing():
            import torch

            if topology.local_size > torch.cuda.device_count():
                return Availability(
                    False,
                    f"needs one GPU per rank: {topology.local_size} ranks, {torch.cuda.device_count()} GPUs here",
                )
        return Availability(True)

    def connect(self, topology: Topology, rendezvous: Rendezvous, *, timeout: timedelta) -> Communicator:
        """Make a store on a free port of rank 0, and a group over it."""
        from unidist_torch.engines.nccl import NcclCommunicator

        store = _make_store(topology, rendezvous, timeout)
        return NcclCommunicator(
            store,
            "world",
            topology.rank,
            tuple(range(topology.world_size)),
            timeout,
            device_index=topology.local_rank,
            address=rendezvous.address,
        )


def _torch_missing() -> str:
    return "" if importlib.util.find_spec("torch") else "torch is not installed; pip install 'unidist-train[torch]'"


def _make_store(topology: Topology, rendezvous: Rendezvous, timeout: timedelta):  # type: ignore[no-untyped-def]  # torch.distributed.Store
    """Return a key-value store that rank 0 serves on a free port of its address in the job (loopback on one host)."""
    from torch._C._distributed_c10d import TCPStore

    leads = topology.rank == 0
    store = None
    if leads:
        store = TCPStore(rendezvous.address, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    own = _PORT.pack(store.port) + rendezvous.address.encode() if store else b""
    replies = rendezvous.allgather(own, timeout=timeout)
    if store is None:
        (port,) = _PORT.unpack_from(replies[0].payload)
        address = replies[0].payload[_PORT.size :].decode()
        store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return store
