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
from unidist.errors import ConfigurationError
from unidist.rendezvous import Rendezvous
from unidist.settings import device_index, ranks_may_share, read_placement, set_variables
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
    """NCCL between GPUs, one for each rank. Never run on a GPU so far."""

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
        """Support ranks that each have their own GPU."""
        if not _torch_missing():
            import torch

            try:
                device_index(topology, visible=torch.cuda.device_count())
            except ConfigurationError as exc:
                return Availability(False, str(exc))
        return Availability(True)

    def connect(self, topology: Topology, rendezvous: Rendezvous, *, timeout: timedelta) -> Communicator:
        """Make a store on a free port of rank 0, and a group over it.

        Raises:
            ConfigurationError: two ranks use one GPU, and may or can not.
        """
        import psutil
        import torch

        from unidist_torch.engines.nccl import NcclCommunicator, check_devices, socket_variables
        from unidist_torch.engines.store import tcp_store

        index = device_index(topology, visible=torch.cuda.device_count())
        assert index is not None, "as `availability` has found"
        # All ranks are there when this returns, and NCCL, which has no time limit, need not wait for one.
        device = f"GPU {torch.cuda.get_device_properties(index).uuid}"
        check_devices(
            [each.payload.decode() for each in rendezvous.allgather(device.encode(), timeout=timeout)],
            may_share=ranks_may_share(),
            version=torch.cuda.nccl.version(),
        )
        store = tcp_store(topology, rendezvous, timeout)
        variables: dict[str, str] = {}
        if not topology.single_host:
            found = {name: [each.address for each in listed] for name, listed in psutil.net_if_addrs().items()}
            variables = socket_variables(rendezvous.address, found)
        with set_variables(variables, keep=True):
            return NcclCommunicator(
                store,
                "world",
                topology.rank,
                tuple(range(topology.world_size)),
                timeout,
                device_index=index,
                address=rendezvous.address,
                waits_on_host=read_placement().worker is not None,
            )


def _torch_missing() -> str:
    return "" if importlib.util.find_spec("torch") else "torch is not installed; pip install 'unidist-train[torch]'"
