"""The place of this process in its job, read from the launcher's environment variables."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from unidist.errors import ConfigurationError
from unidist.rendezvous import MeetingPlace
from unidist.settings.environment import ROLE_VARIABLE, elastic_timeout, stall_times
from unidist.settings.inherited import path_of_inherited
from unidist.settings.launcher_variables import CONTRACTS, Contract
from unidist.settings.values import integer, required, seconds
from unidist.settings.worker_place import WorkerPlace
from unidist.topology import Topology


@dataclass(frozen=True)
class Placement:
    """The place of this process in its job, and its source.

    Args:
        topology: the place.
        source: the launcher whose variables were read ("unidist", "torchrun", ..., "none").
        job_key: a string that is equal on all ranks of the job and differs between jobs on one host.
        secret: the job's secret; empty under launchers that have none.
        meeting_place: of the ranks of a job on several hosts; None if the launcher gives none.
        worker: of this process in an elastic job, whose coordinator assigns its place; None in any other job.
    """

    topology: Topology
    source: str = "none"
    job_key: str = ""
    secret: bytes = b""
    meeting_place: MeetingPlace | None = None
    worker: WorkerPlace | None = None


def read_placement(environ: Mapping[str, str] | None = None) -> Placement:
    """Return this process's place from the first launcher whose variables are set; else that of a single process.

    Raises:
        ConfigurationError: the variables are incomplete or contradict each other.
    """
    env = os.environ if environ is None else environ
    for contract in CONTRACTS:
        # Slurm sets its variables for every process of an allocation; only a step of several tasks is a job of ours.
        if contract.marker in env and (contract.source != "srun" or integer(env, "SLURM_STEP_NUM_TASKS", 1) > 1):
            return _read_contract(env, contract)
    return Placement(Topology())


def ignored_tasks(environ: Mapping[str, str] | None = None) -> int:
    """Return how many processes train together by TF_CONFIG, where it is all that says so; 0: it says no such thing.

    TensorFlow's own strategies read it in a script that `python` has started on each host. No launcher has told this
    process its place, so it is alone.
    """
    env = os.environ if environ is None else environ
    if read_placement(env).source != "none":
        return 0
    try:
        cluster = json.loads(env.get("TF_CONFIG", ""))["cluster"]
        tasks = sum(len(cluster.get(role, ())) for role in ("chief", "worker"))
    except (ValueError, TypeError, KeyError, AttributeError):
        return 0
    return tasks if tasks > 1 else 0


@dataclass(frozen=True)
class ValuesPlace:
    """Address at which the values shared by a job's processes are served.

    Args:
        address: of the server.
        secret: the job's secret.
        name: of this process: its role and index, or its rank.
    """

    address: tuple[str, int]
    secret: bytes
    name: str


def values_place(environ: Mapping[str, str] | None = None) -> ValuesPlace:
    """Return where the values that the job's processes share are served.

    Raises:
        ConfigurationError: nowhere, or the variables cannot be read.
    """
    env = os.environ if environ is None else environ
    text = env.get("UNIDIST_JOB_VALUES", "")
    role, index, rank = env.get(ROLE_VARIABLE, ""), env.get("UNIDIST_ROLE_INDEX", "0"), env.get("UNIDIST_RANK", "")
    name = f"{role} {index}" if role else f"rank {rank}" if rank else "this process"
    if not text:
        raise ConfigurationError(
            f"{name}: UNIDIST_JOB_VALUES is not set, so there is nothing by which it could find the other processes of "
            "the job. `unidist launch` sets it in a job with processes beside its ranks (parameter servers, "
            "evaluators); start the script by it, and do not clear the environment."
        )
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigurationError(
            f"{name}: UNIDIST_JOB_VALUES={text!r} is not HOST:PORT; `unidist launch` sets it, do not change it."
        )
    secret = _read_secret(env)
    if not secret:
        raise ConfigurationError(
            f"{name}: UNIDIST_SECRET_FD is not set, so it cannot prove that it belongs to the job; `unidist launch` "
            "sets it, do not clear the environment."
        )
    return ValuesPlace((host.strip("[]"), int(port)), secret, name)


def job_secret() -> bytes:
    """Return the job's secret; empty outside of a job, and under launchers that give none."""
    return _read_secret(os.environ)


def _read_contract(env: Mapping[str, str], contract: Contract) -> Placement:
    where = f"set by {contract.source}"
    rank = required(env, contract.rank, where)
    world_size = required(env, contract.world_size, where)
    local_size = _local_size(env, contract, world_size)
    local_rank = integer(env, contract.local_rank, rank if local_size == world_size else rank % local_size)
    default_nodes = -(-world_size // local_size)
    topology = Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=integer(env, contract.node_rank, rank // local_size),
        num_nodes=integer(env, contract.num_nodes, default_nodes),
    )
    key = "/".join(f"{name}={env[name]}" for name in contract.job_key if name in env)
    if contract.source == "unidist":
        key = key.partition("/")[0]  # what follows tells apart the parts of a job on one host, which meet
    # Without a name for the job, its processes on this host still share their parent.
    place = _meeting_place(env) if contract.source == "unidist" else None
    key, secret = key or f"parent={os.getppid()}", _read_secret(env)
    worker = None
    if place is not None and env.get("UNIDIST_WORKER"):
        number = integer(env, "UNIDIST_WORKER", 0)
        worker = WorkerPlace(
            number,
            place.server,
            place.host_address,
            key,
            secret,
            timeout=elastic_timeout(env),
            stall_shutdown=stall_times(env)[1],
            orphan_timeout=seconds(env, "UNIDIST_ORPHAN_TIMEOUT_SEC", timedelta(0), zero_allowed=True),
        )
    return Placement(topology, contract.source, key, secret, place, worker)


def _meeting_place(env: Mapping[str, str]) -> MeetingPlace | None:
    text = env.get("UNIDIST_CONTROL_ADDRESS", "")
    if not text:
        return None
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not env.get("UNIDIST_HOST_ADDRESS"):
        raise ConfigurationError(
            f"UNIDIST_CONTROL_ADDRESS={text!r} is not HOST:PORT, or UNIDIST_HOST_ADDRESS is not set; "
            "`unidist launch` sets both, do not change them."
        )
    generation = integer(env, "UNIDIST_GENERATION", 0)
    return MeetingPlace((host.strip("[]"), int(port)), env["UNIDIST_HOST_ADDRESS"], generation)


def _local_size(env: Mapping[str, str], contract: Contract, world_size: int) -> int:
    if contract.source == "srun":  # "2(x3),1": tasks of each node; only the first number matters if all are equal
        first = env.get(contract.local_size, str(world_size)).split("(")[0].split(",")[0]
        size = integer({contract.local_size: first}, contract.local_size, world_size)
    else:
        size = integer(env, contract.local_size, world_size)
    if size < 1:
        raise ConfigurationError(f"{contract.local_size}={size}: a host has at least 1 process")
    return size


def _read_secret(env: Mapping[str, str]) -> bytes:
    """Read the job's secret from the inherited descriptor, or, when a wrapper closed it, from the launcher's."""
    number = env.get("UNIDIST_SECRET_FD")
    if number is None:
        return b""
    path = path_of_inherited(env, "UNIDIST_SECRET_FD", "unidist-secret")
    if path is not None:
        return Path(path).read_bytes()
    raise ConfigurationError(
        f"UNIDIST_SECRET_FD={number} is not open in this process nor in the launcher. "
        "Something between `unidist launch` and this script replaced its descriptors; start the script directly."
    )
