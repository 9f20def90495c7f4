"""The engine `xla`: a name for `--engine`. XLA moves the arrays within its programs, never a communicator."""

from __future__ import annotations

import importlib.metadata
from datetime import timedelta

from unidist.communicator import Communicator
from unidist.engine import Availability, Engine
from unidist.errors import ConfigurationError
from unidist.rendezvous import Rendezvous
from unidist.topology import Topology
from unidist_jax.versions import check_version


class XlaEngine(Engine):
    """Collectives of XLA. It moves no memory of the host, so the job has the engine that it has without it, as well."""

    def availability(self) -> Availability:
        """Available with a JAX of a version that the adapter works with."""
        try:
            check_version()
        except ConfigurationError as exc:
            return Availability(False, str(exc))
        return Availability(True, f"jax {importlib.metadata.version('jax')}, within ud.spmd and TrainStep")

    def supports(self, topology: Topology) -> Availability:
        """Support any number of ranks on any hosts."""
        return Availability(True)

    def connect(self, topology: Topology, rendezvous: Rendezvous, *, timeout: timedelta) -> Communicator:
        """Raise: there is no communicator.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "engine 'xla' runs within programs of JAX (ud.spmd, TrainStep), and carries nothing else: other frameworks "
            "and operations that are called at once use the engine that moves host memory"
        )
