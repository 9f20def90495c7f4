"""What launchers say in the environment, as scripts import it from `horovod.runner.common.util.env`."""

from __future__ import annotations

import os
import re

__all__ = ["get_env_rank_and_size", "is_exportable", "is_kubeflow_mpi"]

_PAIRS = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),  # of `unidist launch`, and of horovodrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
_OF_THIS_HOST = re.compile(r"BASH_FUNC_|OLDPWD|.*CUDA_VISIBLE_DEVICES|HOROVOD_SECRET_KEY|_HOROVOD_SECRET_KEY")
_AGENT_VARIABLE = "OMPI_MCA_plm_rsh_agent"
_KUBEFLOW_AGENT = "/etc/mpi/kubexec.sh"


def get_env_rank_and_size() -> tuple[int, int]:
    """Return rank and number of ranks from the variables of a launcher; (0, 1) without one. `init()` is not needed.

    Raises:
        RuntimeError: a launcher gave one of the two only.
    """
    for names in _PAIRS:
        rank, size = (os.environ.get(name) for name in names)
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            raise RuntimeError(f"of {names[0]} and {names[1]} one is set only: start the script by a launcher")
    return 0, 1


def is_exportable(v: str) -> bool:
    """Return whether a variable of this name means the same on another host."""
    return _OF_THIS_HOST.match(v) is None


def is_kubeflow_mpi() -> bool:
    """Return whether Kubeflow's operator for MPI has started this process."""
    return os.environ.get(_AGENT_VARIABLE) == _KUBEFLOW_AGENT
