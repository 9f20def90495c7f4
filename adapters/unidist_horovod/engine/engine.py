"""The engine `horovod`."""

from __future__ import annotations

import importlib.metadata
from datetime import timedelta

from unidist.communicator import Communicator
from unidist.engine import Availability, Engine
from unidist.errors import ConfigurationError
from unidist.rendezvous import Rendezvous
from unidist.topology import Topology
from unidist_horovod.bindings import choice as bindings


class HorovodEngine(Engine):
    """Horovod by its binding of PyTorch or of TensorFlow, over gloo: host memory, one host.

    The binding is that of a framework which the process has imported, and the same on all ranks; see
    `bindings.choose`. UNIDIST_HOROVOD_BINDING names one.
    """

    def availability(self) -> Availability:
        """Available with Horovod and a binding of an installed framework."""
        try:
            found = bindings.usable()
        except ConfigurationError as exc:
            return Availability(False, str(exc))
        titles = " and ".join(spec.title for spec in found)
        return Availability(True, f"Horovod {importlib.metadata.version('horovod')}, by its binding of {titles}")

    def supports(self, topology: Topology) -> Availability:
        """Support any number of ranks on one host."""
        if not topology.single_host:
            return Availability(False, f"connects the ranks of one host; this job has {topology.num_nodes}")
        return Availability(True)

    def connect(self, topology: Topology, rendezvous: Rendezvous, *, timeout: timedelta) -> Communicator:
        """Start Horovod, or use the one that runs, and return a communicator over all its ranks."""
        chosen = bindings.choose()
        bindings.check_same(chosen, rendezvous, timeout=timeout)
        from unidist_horovod.engine import process
        from unidist_horovod.engine.communicator import HorovodCommunicator
        from unidist_horovod.engine.links import Links

        links = Links(topology.rank, topology.world_size, rendezvous, timeout=timeout)
        try:
            horovod = process.acquire(chosen.load(), topology, rendezvous, timeout=timeout)
        except BaseException:
            links.close()
            raise
        return HorovodCommunicator.of_world(horovod, links, topology, timeout)
