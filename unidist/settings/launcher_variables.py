"""The environment variables by which launchers tell a process its place in the job. Read by `placement` alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contract:
    """The variables of one launcher: names for rank, world size, local rank and size, node rank and count.

    Args:
        source: name of the launcher.
        marker: the variable by which it is recognised.
        job_key: variables that together differ between two jobs on one host.
    """

    source: str
    marker: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str
    node_rank: str = ""
    num_nodes: str = ""
    job_key: tuple[str, ...] = ()


# In order of precedence: `unidist launch` also exports torchrun's and Horovod's names, and srun may run mpirun.
CONTRACTS = (
    Contract(
        "unidist",
        "UNIDIST_RANK",
        "UNIDIST_RANK",
        "UNIDIST_WORLD_SIZE",
        "UNIDIST_LOCAL_RANK",
        "UNIDIST_LOCAL_WORLD_SIZE",
        "UNIDIST_NODE_RANK",
        "UNIDIST_NUM_NODES",
        ("UNIDIST_JOB_ID",),
    ),
    Contract(
        "torchrun",
        "TORCHELASTIC_RUN_ID",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    ),
    Contract(
        "horovodrun",
        "HOROVOD_RANK",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_CROSS_RANK",
        "HOROVOD_CROSS_SIZE",
        ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ),
    Contract(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "",
        "",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Contract(
        "mpirun",
        "PMI_RANK",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        "",
        "",
        ("PMI_PORT", "HYDI_CONTROL_FD", "PMI_JOBID"),
    ),
    Contract(
        "srun",
        "SLURM_PROCID",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_NODEID",
        "SLURM_STEP_NUM_NODES",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
    Contract(
        "env://",
        "RANK",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        ("MASTER_ADDR", "MASTER_PORT"),
    ),
)
