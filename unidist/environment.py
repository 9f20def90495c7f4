"""The only module that reads the process environment.

Precedence everywhere: argument of the call > environment > default. The variables and their defaults are
the table `VARIABLES`; docs/environment.md is checked against it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from unidist.errors import ConfigurationError
from unidist.topology import Topology

VARIABLES: dict[str, str] = {
    "UNIDIST_RANK": "rank of this process; set by the launcher with the five below",
    "UNIDIST_WORLD_SIZE": "number of processes",
    "UNIDIST_LOCAL_RANK": "rank on this host",
    "UNIDIST_LOCAL_WORLD_SIZE": "number of processes on this host",
    "UNIDIST_NODE_RANK": "index of this host",
    "UNIDIST_NUM_NODES": "number of hosts",
    "UNIDIST_JOB_ID": "random name of the job; keeps two jobs on one host apart",
    "UNIDIST_SECRET_FD": "inherited file descriptor that holds the job's secret",
    "UNIDIST_LAUNCHER_PID": "process id of the launcher",
    "UNIDIST_ENGINE": "engine, see `--engine` (default: auto)",
    "UNIDIST_STRATEGY": "strategies, see `--strategy` (default: plain data parallelism)",
    "UNIDIST_ALLREDUCE_ALGORITHM": "see `--allreduce-algorithm` (default: the engine's own)",
    "UNIDIST_TIMEOUT_SEC": "longest wait for a peer in one operation (default: 1800)",
    "UNIDIST_START_TIMEOUT_SEC": "longest wait for all ranks to come to init() (default: 120)",
    "UNIDIST_STALL_CHECK_SEC": "named operations older than this are reported with who is missing (default: 60; 0: no)",
    "UNIDIST_TIMELINE": "file for a Chrome trace; %r becomes the rank (default: none)",
    "UNIDIST_DISABLE_PLUGINS": "plugins not to load, separated by commas (default: none)",
    "UNIDIST_LOG_LEVEL": "debug, info, warning or error (default: warning)",
    "UNIDIST_FUSION_THRESHOLD_BYTES": "named operations are fused up to this size (default: 67108864; 0: never)",
    "UNIDIST_CYCLE_TIME_MS": "longest pause between two rounds of negotiation while ranks disagree (default: 1)",
    "UNIDIST_SHM_CAPACITY_BYTES": "address space for one rank's engine memory (default: the machine's memory)",
    "UNIDIST_SHM_STAGING_BYTES": "staging memory for ordinary memory, per rank and communicator (default: 4194304)",
}


@dataclass(frozen=True)
class Settings:
    """The user's choices as the environment gives them; see `VARIABLES` for meanings and units."""

    engine: str = "auto"
    strategy: str = ""
    allreduce_algorithm: str | None = None
    timeout: timedelta = timedelta(seconds=1800)
    start_timeout: timedelta = timedelta(seconds=120)
    stall_check: timedelta = timedelta(seconds=60)
    timeline: Path | None = None
    disabled_plugins: tuple[str, ...] = ()
    fusion_threshold_bytes: int = 64 << 20
    cycle_time: timedelta = timedelta(milliseconds=1)
    shm_capacity_bytes: int | None = None
    shm_staging_bytes: int = 4 << 20

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read `environ` (default: this process's environment).

        Raises:
            ConfigurationError: a value cannot be read; names the variable and what is accepted.
        """
        env = os.environ if environ is None else environ
        default = cls()
        capacity = _number(env, "UNIDIST_SHM_CAPACITY_BYTES", 0)
        timeline = env.get("UNIDIST_TIMELINE", "")
        return cls(
            engine=env.get("UNIDIST_ENGINE") or "auto",
            strategy=env.get("UNIDIST_STRATEGY", ""),
            allreduce_algorithm=env.get("UNIDIST_ALLREDUCE_ALGORITHM") or None,
            timeout=_seconds(env, "UNIDIST_TIMEOUT_SEC", default.timeout),
            start_timeout=_seconds(env, "UNIDIST_START_TIMEOUT_SEC", default.start_timeout),
            stall_check=_seconds(env, "UNIDIST_STALL_CHECK_SEC", default.stall_check, zero_allowed=True),
            timeline=Path(timeline) if timeline else None,
            disabled_plugins=tuple(name for name in env.get("UNIDIST_DISABLE_PLUGINS", "").split(",") if name),
            fusion_threshold_bytes=_number(env, "UNIDIST_FUSION_THRESHOLD_BYTES", default.fusion_threshold_bytes),
            cycle_time=timedelta(milliseconds=_real(env, "UNIDIST_CYCLE_TIME_MS", 1.0)),
            shm_capacity_bytes=capacity or None,
            shm_staging_bytes=_number(env, "UNIDIST_SHM_STAGING_BYTES", default.shm_staging_bytes),
        )


@dataclass(frozen=True)
class Placement:
    """Where this process stands, and who said so.

    Args:
        topology: the place.
        source: the launcher whose variables were read ("unidist", "torchrun", ..., "none").
        job_key: a string that is equal on all ranks of the job and differs between jobs on one host.
        secret: the job's secret; empty under launchers that have none.
    """

    topology: Topology
    source: str = "none"
    job_key: str = ""
    secret: bytes = b""


@dataclass(frozen=True)
class _Contract:
    """The variables of one launcher: names for rank, world size, local rank and size, node rank and count."""

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
_CONTRACTS = (
    _Contract(
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
    _Contract(
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
    _Contract(
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
    _Contract(
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
    _Contract(
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
    _Contract(
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
    _Contract(
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


def read_placement(environ: Mapping[str, str] | None = None) -> Placement:
    """Return this process's place from the first launcher whose variables are set; else that of a single process.

    Raises:
        ConfigurationError: the variables are incomplete or contradict each other.
    """
    env = os.environ if environ is None else environ
    for contract in _CONTRACTS:
        # Slurm sets its variables for every process of an allocation; only a step of several tasks is a job of ours.
        if contract.marker in env and (contract.source != "srun" or _integer(env, "SLURM_STEP_NUM_TASKS", 1) > 1):
            return _read_contract(env, contract)
    return Placement(Topology())


def _read_contract(env: Mapping[str, str], contract: _Contract) -> Placement:
    where = f"set by {contract.source}"
    rank = _required(env, contract.rank, where)
    world_size = _required(env, contract.world_size, where)
    local_size = _local_size(env, contract, world_size)
    local_rank = _integer(env, contract.local_rank, rank if local_size == world_size else rank % local_size)
    default_nodes = -(-world_size // local_size)
    topology = Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=_integer(env, contract.node_rank, rank // local_size),
        num_nodes=_integer(env, contract.num_nodes, default_nodes),
    )
    key = "/".join(f"{name}={env[name]}" for name in contract.job_key if name in env)
    # Without a name for the job, its processes on this host still share their parent.
    return Placement(topology, contract.source, key or f"parent={os.getppid()}", _read_secret(env))


def _local_size(env: Mapping[str, str], contract: _Contract, world_size: int) -> int:
    if contract.source == "srun":  # "2(x3),1": tasks of each node; only the first number matters when all are alike
        first = env.get(contract.local_size, str(world_size)).split("(")[0].split(",")[0]
        size = _integer({contract.local_size: first}, contract.local_size, world_size)
    else:
        size = _integer(env, contract.local_size, world_size)
    if size < 1:
        raise ConfigurationError(f"{contract.local_size}={size}: a host has at least 1 process")
    return size


def _read_secret(env: Mapping[str, str]) -> bytes:
    """Read the job's secret from the inherited descriptor, or, when a wrapper closed it, from the launcher's."""
    number = env.get("UNIDIST_SECRET_FD")
    if number is None:
        return b""
    for path in (f"/proc/self/fd/{number}", f"/proc/{env.get('UNIDIST_LAUNCHER_PID', '')}/fd/{number}"):
        try:
            if os.readlink(path).startswith("/memfd:unidist-secret"):
                return Path(path).read_bytes()
        except OSError:
            continue
    raise ConfigurationError(
        f"UNIDIST_SECRET_FD={number} is not open in this process nor in the launcher. "
        "Something between `unidist launch` and this script replaced its descriptors; start the script directly."
    )


def configure_logging(environ: Mapping[str, str] | None = None) -> None:
    """Set the level of the `unidist` loggers from UNIDIST_LOG_LEVEL.

    A script that configures logging owns where the lines go; for one that does not, they go to standard error.
    """
    env = os.environ if environ is None else environ
    text = env.get("UNIDIST_LOG_LEVEL", "")
    if not text:
        return
    levels = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
    if text.lower() not in levels:
        raise ConfigurationError(f"UNIDIST_LOG_LEVEL={text!r}; choices: {', '.join(levels)}")
    logger = logging.getLogger("unidist")
    logger.setLevel(levels[text.lower()])
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)


def _required(env: Mapping[str, str], name: str, where: str) -> int:
    if name not in env:
        raise ConfigurationError(f"{name} is not set, though other variables are {where}. Set all of them or none.")
    return _integer(env, name, 0)


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name) if name else None
    if text is None or text == "":
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"{name}={text!r} is not a whole number") from None


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    value = _integer(env, name, default)
    if value < 0:
        raise ConfigurationError(f"{name}={value} is negative; give 0 or more")
    return value


def _real(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        raise ConfigurationError(f"{name}={text!r} is not a number") from None
    if not 0 <= value < float("inf"):
        raise ConfigurationError(f"{name}={text!r}; give 0 or more")
    return value


def _seconds(env: Mapping[str, str], name: str, default: timedelta, *, zero_allowed: bool = False) -> timedelta:
    value = _real(env, name, default.total_seconds())
    if value == 0 and not zero_allowed:
        raise ConfigurationError(f"{name}=0: a wait needs a time limit above 0 seconds")
    return timedelta(seconds=value)
