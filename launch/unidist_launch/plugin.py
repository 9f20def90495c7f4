"""What the launch package registers, through the same entry point as everybody else."""

from __future__ import annotations

from unidist.plugins import hookimpl
from unidist.registry import LauncherSpec, Registry


@hookimpl
def unidist_register_launchers(registry: Registry[LauncherSpec]) -> None:
    """Register the launchers."""
    registry.add(LauncherSpec("local", "unidist_launch.local:LocalLauncher", "all ranks on this host (the default)"))
    registry.add(
        LauncherSpec("elastic", "unidist_launch.elastic:ElasticLauncher", "ranks that come and go (--min-np, --max-np)")
    )
    registry.add(LauncherSpec("ssh", "unidist_launch.ssh:SshLauncher", "ranks on the hosts of -H, by ssh"))
    registry.add(
        LauncherSpec(
            "mpi", "unidist_launch.mpi:MpiLauncher", "ranks that mpirun starts, for the engine mpi (Open MPI 5)"
        )
    )
    registry.add(
        LauncherSpec(
            "slurm",
            "unidist_launch.slurm:SlurmLauncher",
            "ranks on the nodes of an allocation of Slurm, by srun",
            marker="SLURM_JOB_NODELIST",
        )
    )
    registry.add(
        LauncherSpec(
            "kubernetes",
            "unidist_launch.kubernetes:KubernetesLauncher",
            "ranks in the pods of a job that `unidist kubernetes manifest` wrote",
            marker="UNIDIST_POD_LEADER",
        )
    )
