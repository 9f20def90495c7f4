"""The engines `gloo` and `nccl`: torch.distributed's process groups as communicators.

The groups are made directly, beside whatever the script does with `torch.distributed.init_process_group`: they
use a separate store on a free port, never MASTER_PORT.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Sequence
from datetime import timedelta

from typing_extensions import override

from unidist.communicator import Communicator
from unidist.engine import Availability, ConnectsPart, Engine
from unidist.errors import ConfigurationError
from unidist.installation import install_command
from unidist.rendezvous import Rendezvous
from unidist.runtime import check_package
from unidist.settings import device_index, ranks_may_share, read_placement, set_variables
from unidist.topology import Topology

_OLDEST_TORCH, _END_OF_TORCH = (2, 6), (2, 16)
"""Versions whose `ProcessGroupNCCL` has been read. From 2.14 on there is a second one, which `init_process_group` uses
from 2.15 on; the engine drives the first."""
_NEEDED = ("Options", "abort", "eager_connect_single_device", "shutdown")
"""What it needs of that class."""

_log = logging.getLogger("unidist.engine")


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


class NcclEngine(Engine, ConnectsPart):
    """NCCL between GPUs, one for each rank. Never run on a GPU so far."""

    def availability(self) -> Availability:
        """Available with torch, NCCL and a GPU."""
        missing = _torch_missing()
        if missing:
            return Availability(False, missing)
        import torch.distributed

        if not torch.cuda.is_available():
            return Availability(False, "no CUDA device is visible to torch")
        if missing := _nccl_missing():
            return Availability(False, missing)
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
        return self.connect_part(topology, range(topology.world_size), rendezvous, timeout=timeout)

    @override
    def connect_part(
        self, topology: Topology, members: Sequence[int], rendezvous: Rendezvous, *, timeout: timedelta
    ) -> Communicator:
        import psutil
        import torch

        from unidist_torch.engines.nccl import NcclCommunicator, check_devices, socket_variables
        from unidist_torch.engines.store import tcp_store

        rank = list(members).index(topology.rank)
        if topology.rank == 0:
            _warn_of_torch(torch.__version__)
        index = device_index(topology, visible=torch.cuda.device_count())
        assert index is not None, "as `availability` has found"
        # All ranks are there when this returns, and NCCL, which has no time limit, need not wait for one.
        device = f"GPU {torch.cuda.get_device_properties(index).uuid}"
        check_devices(
            [each.payload.decode() for each in rendezvous.allgather(device.encode(), timeout=timeout)],
            members=members,
            may_share=ranks_may_share(),
            version=torch.cuda.nccl.version(),
        )
        store = tcp_store(rank, rendezvous, timeout)
        variables: dict[str, str] = {}
        if not topology.single_host:
            found = {name: [each.address for each in listed] for name, listed in psutil.net_if_addrs().items()}
            variables = socket_variables(rendezvous.address, found)
        with set_variables(variables, keep=True):
            return NcclCommunicator(
                store,
                "world",
                rank,
                tuple(members),
                timeout,
                device_index=index,
                address=rendezvous.address,
                waits_on_host=read_placement().worker is not None,
            )


def _torch_missing() -> str:
    return (
        ""
        if importlib.util.find_spec("torch")
        else f"torch is not installed; {install_command('unidist-train[torch]')}"
    )


def _nccl_missing() -> str:
    """Return what this PyTorch lacks for the engine `nccl`; "": nothing."""
    import torch.distributed

    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return "this build of torch has no NCCL"
    group = getattr(torch.distributed, "ProcessGroupNCCL", None)
    lacking = ", ".join(name for name in _NEEDED if not hasattr(group, name))
    if lacking:
        oldest, end = (".".join(map(str, version)) for version in (_OLDEST_TORCH, _END_OF_TORCH))
        return (
            f"torch {torch.__version__} has no torch.distributed.ProcessGroupNCCL with {lacking}; install torch >= "
            f"{oldest}, < {end}"
        )
    return ""


def _warn_of_torch(found: str) -> None:
    """Warn of a version in which the environment variables of `ProcessGroupNCCL`, say, may do something else."""
    try:
        check_package("engine nccl", "torch", "torch", oldest=_OLDEST_TORCH, end=_END_OF_TORCH, found=found)
    except ConfigurationError as exc:
        _log.warning("%s. It may work; if a lost rank is not noticed, that is why", exc)
