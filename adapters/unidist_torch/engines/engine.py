"""The engines `gloo` and `nccl`: torch.distributed's process groups as communicators.

The groups are made directly, beside whatever the script does with `torch.distributed.init_process_group`: they
use a separate store on a free port, never MASTER_PORT.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from datetime import timedelta

from unidist.communicator import Communicator
from unidist.engine import Availability, Engine
from unidist.rendezvous import Rendezvous
from unidist.topology import Topology


class GlooEngine(Engine):
    """gloo over TCP. Host memory; CUDA tensors are staged through host memory."""

    def availability(self) -> Availability:
        """Available with torch and its torch.distributed."""
        missing = _torch_missing()
        if missing:
            return Availability(False, missing)
        if "torch" in sys.modules:  # else the launcher would wait seconds for what practically every build has
            import torch.distributed

            if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
                return Availability(False, "this build of torch has no gloo; install a build with torch.distributed")
        return Availability(True, f"torch {importlib.metadata.version('torch')}")

    def supports(self, topology: Topology) -> Availability:
        """Support any number of ranks on any hosts."""
        return Availability(True)

    def connect(self, topology: Topology, rendezvous: Rendezvous, *, timeout: timedelta) -> Communicator:
        """Make a store on a free port of rank 0, and a group over it."""
        from unidist_torch.engines.gloo import GlooCommunicator
        from unidist_torch.engines.store import authenticated_store

        store = authenticated_store(topology, rendezvous, timeout)
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
        from unidist_torch.engines.store import tcp_store

        store = tcp_store(topology, rendezvous, timeout)
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
