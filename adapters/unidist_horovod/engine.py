"""The engine `horovod`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from datetime import timedelta
from pathlib import Path

from unidist.communicator import Communicator
from unidist.engine import Availability, Engine
from unidist.rendezvous import Rendezvous
from unidist.topology import Topology

_HOW = "`unidist build horovod` builds and installs it"


class HorovodEngine(Engine):
    """Horovod by its PyTorch binding, over gloo: host memory, one host."""

    def availability(self) -> Availability:
        """Needs Horovod with its PyTorch binding, and PyTorch."""
        try:
            version = importlib.metadata.version("horovod")
        except importlib.metadata.PackageNotFoundError:
            return Availability(False, f"Horovod is not installed; {_HOW}")
        if importlib.util.find_spec("torch") is None:
            return Availability(False, "PyTorch is not installed, and Horovod is used by its PyTorch binding")
        spec = importlib.util.find_spec("horovod")  # the package's own module imports nothing
        folders = spec.submodule_search_locations if spec is not None else None
        if not any(list(Path(folder, "torch").glob("mpi_lib_v2*.so")) for folder in folders or ()):
            return Availability(False, f"Horovod {version} was built without PyTorch; {_HOW}")
        return Availability(True, f"Horovod {version}")

    def supports(self, topology: Topology) -> Availability:
        """Any number of ranks on one host."""
        if not topology.single_host:
            return Availability(False, f"connects the ranks of one host; this job has {topology.num_nodes}")
        return Availability(True)

    def connect(self, topology: Topology, rendezvous: Rendezvous, *, timeout: timedelta) -> Communicator:
        """Start Horovod, or use the one that runs, and return a communicator over all its ranks."""
        from unidist_horovod import process
        from unidist_horovod.communicator import HorovodCommunicator
        from unidist_horovod.links import Links
        from unidist_horovod.torch_binding import TorchBinding

        links = Links(topology.rank, topology.world_size, rendezvous, timeout=timeout)
        try:
            horovod = process.acquire(TorchBinding(), topology, rendezvous, timeout=timeout)
        except BaseException:
            links.close()
            raise
        return HorovodCommunicator.of_world(horovod, links, topology, timeout)
