"""The only module that reads the process environment.

Precedence everywhere: argument of the call > UNIDIST_* > HOROVOD_* > default. The variables and their defaults are
the tables `VARIABLES` and `HOROVOD_VARIABLES`; docs/environment.md and docs/horovod.md are checked against them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from unidist.control.worker_place import WorkerPlace
from unidist.durable_options import AUTO, DurableOptions, interval_of
from unidist.errors import ConfigurationError
from unidist.launch_contracts import CONTRACTS, Contract
from unidist.rendezvous import MeetingPlace
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
    "UNIDIST_CONTROL_ADDRESS": "HOST:PORT of the job's control server; set for several hosts, as are the next two",
    "UNIDIST_HOST_ADDRESS": "address at which the other hosts reach this one",
    "UNIDIST_GENERATION": "membership of the world that this process belongs to",
    "UNIDIST_WORKER": "number of this process in an elastic job, where its rank may change; set by the launcher",
    "UNIDIST_AGENT_ORDER": "what an agent that another program starts is to do, where it cannot be told otherwise",
    "UNIDIST_POD_LEADER": "HOST:PORT of pod 0 of a Kubernetes job; set by the manifest, as are the next three",
    "UNIDIST_PODS": "number of pods",
    "UNIDIST_POD_SLOTS": "ranks of each pod",
    "UNIDIST_POD_SECRET_FILE": "mounted file that holds the job's secret",
    "UNIDIST_ELASTIC_TIMEOUT_SEC": "longest wait of a process for a world that takes it in (default: 600)",
    "UNIDIST_ORPHAN_TIMEOUT_SEC": "how long an elastic job's processes look for a launcher that died (default: 0: not)",
    "UNIDIST_CHECKPOINT_DIR": "folder for durable checkpoints of elastic states (default: none are made)",
    "UNIDIST_CHECKPOINT_INTERVAL_SEC": "time between two of them (default: auto: so that they take less than 3.5 %)",
    "UNIDIST_CHECKPOINT_KEEP": "how many of them stay (default: 2)",
    "UNIDIST_HEARTBEAT_SEC": "a host from which nothing is heard for longer is lost (default: 5)",
    "UNIDIST_ENGINE": "engine, see `--engine` (default: auto)",
    "UNIDIST_STRATEGY": "strategies, see `--strategy` (default: plain data parallelism)",
    "UNIDIST_ALLREDUCE_ALGORITHM": "see `--allreduce-algorithm` (default: the engine's own)",
    "UNIDIST_HIERARCHICAL": "0: collectives over several hosts take no account of which ranks share one (default: 1)",
    "UNIDIST_TIMEOUT_SEC": "longest wait for a peer in one operation (default: 1800)",
    "UNIDIST_START_TIMEOUT_SEC": "longest wait for all ranks to come to init() (default: 120)",
    "UNIDIST_STALL_CHECK_SEC": "named operations older than this are reported with who is missing (default: 60; 0: no)",
    "UNIDIST_STALL_SHUTDOWN_SEC": "named operations older than this end the job (default: 0: UNIDIST_TIMEOUT_SEC does)",
    "UNIDIST_TIMELINE": "file for a Chrome trace; %r becomes the rank (default: none)",
    "UNIDIST_TIMELINE_MARK_CYCLES": "1: the trace shows each round of negotiation (default: 0)",
    "UNIDIST_DISABLE_PLUGINS": "plugins not to load, separated by commas (default: none)",
    "UNIDIST_LOG_LEVEL": "trace, debug, info, warning, error or fatal (default: warning)",
    "UNIDIST_LOG_TIMESTAMP": "1: log lines begin with the time (default: 0)",
    "UNIDIST_FUSION_THRESHOLD_BYTES": "named operations are fused up to this size (default: 67108864; 0: never)",
    "UNIDIST_CYCLE_TIME_MS": "longest pause between two rounds of negotiation while ranks disagree (default: 1)",
    "UNIDIST_CACHE_CAPACITY": "names of operations that ranks need not spell out again (default: 8192; 0: none)",
    "UNIDIST_AUTOTUNE": "1: find the best size of gradient buckets, and cycle time, in the first updates (default: 0)",
    "UNIDIST_AUTOTUNE_LOG": "file for what the search tried, as CSV (default: none)",
    "UNIDIST_HOROVOD_BINDING": "torch or tensorflow: by which binding `--engine horovod` uses Horovod (default: auto)",
    "UNIDIST_SHM_CAPACITY_BYTES": "address space for one rank's engine memory (default: the machine's memory)",
    "UNIDIST_SHM_STAGING_BYTES": "staging memory for ordinary memory, per rank and communicator (default: 4194304)",
}

HOROVOD_VARIABLES: dict[str, str] = {
    "HOROVOD_TIMELINE": "as UNIDIST_TIMELINE; DYNAMIC: none, as start_timeline() needs no permission",
    "HOROVOD_TIMELINE_MARK_CYCLES": "as UNIDIST_TIMELINE_MARK_CYCLES",
    "HOROVOD_FUSION_THRESHOLD": "as UNIDIST_FUSION_THRESHOLD_BYTES",
    "HOROVOD_CYCLE_TIME": "as UNIDIST_CYCLE_TIME_MS",
    "HOROVOD_CACHE_CAPACITY": "as UNIDIST_CACHE_CAPACITY",
    "HOROVOD_STALL_CHECK_DISABLE": "1: no stall check and, as in Horovod, no stall shutdown",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "as UNIDIST_STALL_CHECK_SEC",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "as UNIDIST_STALL_SHUTDOWN_SEC",
    "HOROVOD_START_TIMEOUT": "as UNIDIST_START_TIMEOUT_SEC",
    "HOROVOD_ELASTIC_TIMEOUT": "as UNIDIST_ELASTIC_TIMEOUT_SEC",
    "HOROVOD_AUTOTUNE": "as UNIDIST_AUTOTUNE",
    "HOROVOD_AUTOTUNE_LOG": "as UNIDIST_AUTOTUNE_LOG",
    "HOROVOD_LOG_LEVEL": "as UNIDIST_LOG_LEVEL",
    "HOROVOD_LOG_HIDE_TIME": "0: as UNIDIST_LOG_TIMESTAMP=1",
}
"""Horovod's own settings, each read where ours is not set."""

LOG_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
MAX_CACHE_CAPACITY = 1 << 16
"""A name's number on the wire has 16 bits."""


@dataclass(frozen=True)
class Settings:
    """The user's choices as the environment gives them; see `VARIABLES` for meanings and units.

    `stall_shutdown` of zero: only `timeout` ends an operation that waits.
    """

    engine: str = "auto"
    strategy: str = ""
    allreduce_algorithm: str | None = None
    hierarchical: bool = True
    timeout: timedelta = timedelta(seconds=1800)
    start_timeout: timedelta = timedelta(seconds=120)
    heartbeat: timedelta = timedelta(seconds=5)
    elastic_timeout: timedelta = timedelta(seconds=600)
    stall_check: timedelta = timedelta(seconds=60)
    stall_shutdown: timedelta = timedelta(0)
    timeline: Path | None = None
    timeline_mark_cycles: bool = False
    disabled_plugins: tuple[str, ...] = ()
    fusion_threshold_bytes: int = 64 << 20
    cycle_time: timedelta = timedelta(milliseconds=1)
    cache_capacity: int = 8192
    autotune: bool = False
    autotune_log: Path | None = None
    horovod_binding: str = "auto"
    shm_capacity_bytes: int | None = None
    shm_staging_bytes: int = 4 << 20
    durable: DurableOptions | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read `environ` (default: this process's environment).

        Raises:
            ConfigurationError: a value cannot be read; names the variable and what is accepted.
        """
        env = os.environ if environ is None else environ
        default = cls()
        capacity = _number(env, "UNIDIST_SHM_CAPACITY_BYTES", 0)
        fusion = _first(env, "UNIDIST_FUSION_THRESHOLD_BYTES", "HOROVOD_FUSION_THRESHOLD")
        start_timeout = _first(env, "UNIDIST_START_TIMEOUT_SEC", "HOROVOD_START_TIMEOUT")
        mark_cycles = _first(env, "UNIDIST_TIMELINE_MARK_CYCLES", "HOROVOD_TIMELINE_MARK_CYCLES")
        autotune_log = _first(env, "UNIDIST_AUTOTUNE_LOG", "HOROVOD_AUTOTUNE_LOG")
        stall_check, stall_shutdown = _stall_times(env, default)
        return cls(
            engine=env.get("UNIDIST_ENGINE") or "auto",
            strategy=env.get("UNIDIST_STRATEGY", ""),
            allreduce_algorithm=env.get("UNIDIST_ALLREDUCE_ALGORITHM") or None,
            hierarchical=_integer(env, "UNIDIST_HIERARCHICAL", 1) > 0,
            timeout=_seconds(env, "UNIDIST_TIMEOUT_SEC", default.timeout),
            start_timeout=_seconds(env, start_timeout, default.start_timeout),
            heartbeat=_seconds(env, "UNIDIST_HEARTBEAT_SEC", default.heartbeat),
            elastic_timeout=_elastic_timeout(env),
            stall_check=stall_check,
            stall_shutdown=stall_shutdown,
            timeline=_timeline(env),
            timeline_mark_cycles=_integer(env, mark_cycles, 0) > 0,
            disabled_plugins=tuple(name for name in env.get("UNIDIST_DISABLE_PLUGINS", "").split(",") if name),
            fusion_threshold_bytes=_number(env, fusion, default.fusion_threshold_bytes),
            cycle_time=timedelta(
                milliseconds=_real(env, _first(env, "UNIDIST_CYCLE_TIME_MS", "HOROVOD_CYCLE_TIME"), 1.0)
            ),
            cache_capacity=_cache_capacity(env, default.cache_capacity),
            autotune=_integer(env, _first(env, "UNIDIST_AUTOTUNE", "HOROVOD_AUTOTUNE"), 0) > 0,
            autotune_log=Path(env[autotune_log]) if env.get(autotune_log) else None,
            horovod_binding=env.get("UNIDIST_HOROVOD_BINDING") or default.horovod_binding,
            shm_capacity_bytes=capacity or None,
            shm_staging_bytes=_number(env, "UNIDIST_SHM_STAGING_BYTES", default.shm_staging_bytes),
            durable=_durable(env),
        )


@dataclass(frozen=True)
class Placement:
    """Where this process stands, and who said so.

    Args:
        topology: the place.
        source: the launcher whose variables were read ("unidist", "torchrun", ..., "none").
        job_key: a string that is equal on all ranks of the job and differs between jobs on one host.
        secret: the job's secret; empty under launchers that have none.
        meeting_place: where the ranks of a job on several hosts meet; None if the launcher gives none.
        worker: what this process is in an elastic job, whose coordinator says its place; None in any other.
    """

    topology: Topology
    source: str = "none"
    job_key: str = ""
    secret: bytes = b""
    meeting_place: MeetingPlace | None = None
    worker: WorkerPlace | None = None


@contextmanager
def set_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for a while; not thread-safe, as the process environment is not."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def read_placement(environ: Mapping[str, str] | None = None) -> Placement:
    """Return this process's place from the first launcher whose variables are set; else that of a single process.

    Raises:
        ConfigurationError: the variables are incomplete or contradict each other.
    """
    env = os.environ if environ is None else environ
    for contract in CONTRACTS:
        # Slurm sets its variables for every process of an allocation; only a step of several tasks is a job of ours.
        if contract.marker in env and (contract.source != "srun" or _integer(env, "SLURM_STEP_NUM_TASKS", 1) > 1):
            return _read_contract(env, contract)
    return Placement(Topology())


def _read_contract(env: Mapping[str, str], contract: Contract) -> Placement:
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
    if contract.source == "unidist":
        key = key.partition("/")[0]  # what follows tells apart the parts of a job on one host, which meet
    # Without a name for the job, its processes on this host still share their parent.
    place = _meeting_place(env) if contract.source == "unidist" else None
    key, secret = key or f"parent={os.getppid()}", _read_secret(env)
    worker = None
    if place is not None and env.get("UNIDIST_WORKER"):
        number = _integer(env, "UNIDIST_WORKER", 0)
        worker = WorkerPlace(
            number,
            place.server,
            place.host_address,
            key,
            secret,
            timeout=_elastic_timeout(env),
            orphan_timeout=_seconds(env, "UNIDIST_ORPHAN_TIMEOUT_SEC", timedelta(0), zero_allowed=True),
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
    generation = _integer(env, "UNIDIST_GENERATION", 0)
    return MeetingPlace((host.strip("[]"), int(port)), env["UNIDIST_HOST_ADDRESS"], generation)


def _local_size(env: Mapping[str, str], contract: Contract, world_size: int) -> int:
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

    A script that configures logging owns where the lines go; for one that does not, they go to standard error, with
    the time if UNIDIST_LOG_TIMESTAMP asks for it.
    """
    env = os.environ if environ is None else environ
    name = _first(env, "UNIDIST_LOG_LEVEL", "HOROVOD_LOG_LEVEL")
    text = env.get(name, "")
    timestamp = _log_timestamp(env)
    if not text and not timestamp:
        return
    if text and text.lower() not in LOG_LEVELS:
        raise ConfigurationError(f"{name}={text!r}; choices: {', '.join(LOG_LEVELS)}")
    logger = logging.getLogger("unidist")
    if text:
        logger.setLevel(LOG_LEVELS[text.lower()])
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"{'%(asctime)s ' if timestamp else ''}%(name)s: %(message)s"))
        logger.addHandler(handler)


def _log_timestamp(env: Mapping[str, str]) -> bool:
    if env.get("UNIDIST_LOG_TIMESTAMP"):
        return _integer(env, "UNIDIST_LOG_TIMESTAMP", 0) > 0
    return bool(env.get("HOROVOD_LOG_HIDE_TIME")) and _integer(env, "HOROVOD_LOG_HIDE_TIME", 1) == 0


def _stall_times(env: Mapping[str, str], default: Settings) -> tuple[timedelta, timedelta]:
    """Return the ages at which a waiting operation is reported and at which it ends the job; zero: never."""
    check = _first(env, "UNIDIST_STALL_CHECK_SEC", "HOROVOD_STALL_CHECK_TIME_SECONDS")
    shutdown = _first(env, "UNIDIST_STALL_SHUTDOWN_SEC", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    times = (
        _seconds(env, check, default.stall_check, zero_allowed=True),
        _seconds(env, shutdown, default.stall_shutdown, zero_allowed=True),
    )
    if _integer(env, "HOROVOD_STALL_CHECK_DISABLE", 0) > 0:
        # It switches off Horovod's times, not ours: a variable of ours wins over any of Horovod's.
        none = timedelta(0)
        return (times[0] if env.get("UNIDIST_STALL_CHECK_SEC") else none), (
            times[1] if env.get("UNIDIST_STALL_SHUTDOWN_SEC") else none
        )
    return times


def _elastic_timeout(env: Mapping[str, str]) -> timedelta:
    name = _first(env, "UNIDIST_ELASTIC_TIMEOUT_SEC", "HOROVOD_ELASTIC_TIMEOUT")
    return _seconds(env, name, Settings.elastic_timeout)


def _durable(env: Mapping[str, str]) -> DurableOptions | None:
    if not env.get("UNIDIST_CHECKPOINT_DIR"):
        return None
    interval = interval_of(env.get("UNIDIST_CHECKPOINT_INTERVAL_SEC") or AUTO)
    keep = _integer(env, "UNIDIST_CHECKPOINT_KEEP", DurableOptions.keep)
    return DurableOptions(Path(os.path.abspath(env["UNIDIST_CHECKPOINT_DIR"])), interval, keep)


def _timeline(env: Mapping[str, str]) -> Path | None:
    text = env.get("UNIDIST_TIMELINE") or env.get("HOROVOD_TIMELINE", "")
    return Path(text) if text and text != "DYNAMIC" else None


def _cache_capacity(env: Mapping[str, str], default: int) -> int:
    name = _first(env, "UNIDIST_CACHE_CAPACITY", "HOROVOD_CACHE_CAPACITY")
    capacity = _number(env, name, default)
    if capacity > MAX_CACHE_CAPACITY:
        raise ConfigurationError(f"{name}={capacity} is more than {MAX_CACHE_CAPACITY}, the largest that is possible")
    return capacity


def _first(env: Mapping[str, str], *names: str) -> str:
    """Return the first of `names` that is set; the first of all if none is."""
    return next((name for name in names if env.get(name)), names[0])


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
