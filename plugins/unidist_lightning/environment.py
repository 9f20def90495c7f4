"""The place of this process, as Lightning asks for it."""

from __future__ import annotations

from lightning.fabric.plugins.environments import ClusterEnvironment
from typing_extensions import override

import unidist.torch as ud
from unidist.errors import ConfigurationError


class UnidistEnvironment(ClusterEnvironment):
    """The ranks of the job as `ud.init()` finds them; Lightning itself launches nothing.

    Works under `unidist launch`, torchrun, srun and mpirun, and for a process alone. Whoever first asks for a rank
    calls `ud.init()`.
    """

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        raise ConfigurationError(
            "unidist's ranks meet by themselves, and no main_address is known to them. Use ud.init() and its operations"
        )

    @property
    @override
    def main_port(self) -> int:
        raise ConfigurationError(
            "unidist's ranks meet by themselves, and no main_port is known to them. Use ud.init() and its operations"
        )

    @staticmethod
    @override
    def detect() -> bool:
        return ud.is_initialized()

    @override
    def world_size(self) -> int:
        ud.init()
        return ud.size()

    @override
    def set_world_size(self, size: int) -> None:
        """Do nothing: the job has the size that it was started with."""

    @override
    def global_rank(self) -> int:
        ud.init()
        return ud.rank()

    @override
    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the job has numbered its ranks."""

    @override
    def local_rank(self) -> int:
        ud.init()
        return ud.local_rank()

    @override
    def node_rank(self) -> int:
        ud.init()
        return ud.cross_rank()

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Check what a script says about the number of processes.

        Args:
            num_devices: `devices=`; 1 is the default on CPUs, and right for any number of ranks.
            num_nodes: `num_nodes=`; 1 is the default, and right for any number of hosts.

        Raises:
            ConfigurationError: the job has another number.
        """
        ud.init()
        if num_nodes not in (1, ud.cross_size()):
            raise ConfigurationError(
                f"num_nodes={num_nodes}, but the job has {ud.size()} rank(s) on {ud.cross_size()} host(s). Leave "
                "num_nodes out: unidist launch -H says which hosts there are"
            )
        if num_devices not in (1, ud.local_size()):
            raise ConfigurationError(
                f"devices={num_devices}, but the job has {ud.local_size()} rank(s) on this host: start it by "
                f"unidist launch -np {num_devices}, or leave devices out"
            )
