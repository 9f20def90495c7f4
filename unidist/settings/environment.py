"""The environment variables that users set, and the choices that they make by them.

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

from unidist.errors import ConfigurationError
from unidist.launcher import AUTO, DurableOptions, interval_of
from unidist.settings.values import choice, first_set, integer, non_negative, real, seconds

ROLE_VARIABLE = "UNIDIST_ROLE"

VARIABLES: dict[str, str] = {
    "UNIDIST_RANK": "rank of this process; set by the launcher with the five below",
    "UNIDIST_WORLD_SIZE": "number of processes",
    "UNIDIST_LOCAL_RANK": "rank on this host",
    "UNIDIST_LOCAL_WORLD_SIZE": "number of processes on this host",
    "UNIDIST_NODE_RANK": "index of this host",
    "UNIDIST_NUM_NODES": "number of hosts",
    "UNIDIST_ROLE": "what a process does that is no rank: ps, evaluator, ...; set by the launcher, as the next two",
    "UNIDIST_ROLE_INDEX": "counts the processes of a role",
    "UNIDIST_JOB_VALUES": "HOST:PORT where all processes of a job share values, if some are no ranks",
    "UNIDIST_DATA_KEY": "key of the job that `unidist data-worker` joins, unless --key-file has it",
    "UNIDIST_DATA_KEY_FILE": "file into which data worker 0 writes that key; set by the launcher",
    "UNIDIST_EVALUATOR": "name of the job's evaluator; set by the launcher, as is the next",
    "UNIDIST_EVALUATED_STEP": "the last checkpoint that an earlier process of it has evaluated",
    "UNIDIST_JOB_ID": "random name of the job; keeps two jobs on one host apart",
    "UNIDIST_BEATS_FD": "inherited file descriptor on which a process beside the ranks beats",
    "UNIDIST_SECRET_FD": "inherited file descriptor that holds the job's secret",
    "UNIDIST_PROCESS_FD": "inherited file descriptor by which a rank tells the launcher its process id",
    "UNIDIST_LAUNCHER_PID": "process id of the launcher",
    "UNIDIST_CONTROL_ADDRESS": "HOST:PORT of the job's control server; set for several hosts, as are the next two",
    "UNIDIST_HOST_ADDRESS": "address at which the other hosts reach this one",
    "UNIDIST_GENERATION": "membership of the world that this process belongs to",
    "UNIDIST_WORKER": "number of this process in an elastic job, where its rank may change; set by the launcher",
    "UNIDIST_AGENT_ORDER": "what an agent that another program starts is to do, where it cannot be told otherwise",
    "UNIDIST_POD_LEADER": "HOST:PORT of pod 0 of a Kubernetes job; set by the manifest, as are the next five",
    "UNIDIST_PODS": "number of pods",
    "UNIDIST_POD_SLOTS": "ranks of each pod",
    "UNIDIST_POD_SECRET_FILE": "mounted file that holds the job's secret",
    "UNIDIST_POD_ROLE": "launcher or worker, in an elastic job",
    "UNIDIST_POD_NAME": "this pod's own name, in an elastic job",
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
    "UNIDIST_STALL_CHECK_SEC": "calls that wait longer are reported, with who is waited for (default: 60; 0: never)",
    "UNIDIST_STALL_SHUTDOWN_SEC": "named operations older than this end the job (default: 0: UNIDIST_TIMEOUT_SEC does)",
    "UNIDIST_DEADLOCK_SEC": "ranks that wait for each other for so long end with an error (default: 2; 0: never)",
    "UNIDIST_ON_NONFINITE": "error, skip or off: what happens when a gradient is NaN or infinite; default: off",
    "UNIDIST_VERIFY": "first, every=N or off: compare the distributed model with the script's own (default: first)",
    "UNIDIST_TIMELINE": "file for a Chrome trace; %r becomes the rank (default: none)",
    "UNIDIST_TIMELINE_MARK_CYCLES": "1: the trace shows each round of negotiation (default: 0)",
    "UNIDIST_TIMELINE_PER_TENSOR": "1: the trace has a row per tensor, not per phase (default: UNIDIST_AS_HOROVOD)",
    "UNIDIST_DISABLE_PLUGINS": "plugins not to load, separated by commas (default: none)",
    "UNIDIST_LOG_LEVEL": "trace, debug, info, warning, error or fatal (default: warning)",
    "UNIDIST_LOG_TIMESTAMP": "1: log lines begin with the time (default: 0)",
    "UNIDIST_FUSION_THRESHOLD_BYTES": "named operations are fused up to this size (default: 67108864; 0: never)",
    "UNIDIST_CYCLE_TIME_MS": "longest pause between two rounds of negotiation while ranks disagree (default: 1)",
    "UNIDIST_CACHE_CAPACITY": "names of operations that ranks need not spell out again (default: 8192; 0: none)",
    "UNIDIST_AUTOTUNE": "1: find the best size of gradient buckets, and cycle time, in the first updates (default: 0)",
    "UNIDIST_AUTOTUNE_LOG": "file for what the search tried, as CSV (default: none)",
    "UNIDIST_AS_HOROVOD": "1: `import horovod` means unidist in the ranks of a job, as by --as-horovod (default: 0)",
    "UNIDIST_HOROVOD_BINDING": "torch or tensorflow: by which binding `--engine horovod` uses Horovod (default: auto)",
    "UNIDIST_SHM_CAPACITY_BYTES": "address space for one rank's engine memory (default: the machine's memory)",
    "UNIDIST_SHM_STAGING_BYTES": "staging memory for ordinary memory, per rank and communicator (default: 1048576)",
    "UNIDIST_TLS": "1: what ranks of several hosts send to each other is encrypted, see `--tls` (default: 0)",
    "UNIDIST_TCP_CONNECTIONS": "connections between each two ranks, 1 to 9; what is long uses all but one (default: 2)",
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

MAX_TCP_CONNECTIONS = 9
"""As in the C code of the engine `tcp`."""


@dataclass(frozen=True)
class Verify:
    """The checks that `--verify` requests.

    Args:
        first: compare outputs before the first step, and replicas after the first updates and at checkpoints.
        every: compare replicas after each so many updates, too; 0: not.
        replay: compute a batch twice in the first step and after each so many; 0: not.
    """

    first: bool = True
    every: int = 0
    replay: int = 0

    @classmethod
    def parse(cls, text: str, source: str) -> Verify:
        """Read "first", "every=N", "replay=N", the last two with a comma between them, or "off".

        Raises:
            ConfigurationError: it is none of these; names `source`.
        """
        if text in ("first", "off"):
            return cls(first=text == "first")
        found: dict[str, int] = {}
        for part in text.split(","):
            name, _, number = part.partition("=")
            if name not in ("every", "replay") or name in found or not (number.isdecimal() and int(number)):
                raise ConfigurationError(
                    f"{source}={text!r}; choices: first, every=N (N updates, at least 1), replay=N (N steps), "
                    "every=N,replay=M, off"
                )
            found[name] = int(number)
        return cls(every=found.get("every", 0), replay=found.get("replay", 0))


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
    deadlock: timedelta = timedelta(seconds=2)
    verify: Verify = Verify()
    on_nonfinite: str = "off"
    timeline: Path | None = None
    timeline_mark_cycles: bool = False
    timeline_per_tensor: bool = False
    disabled_plugins: tuple[str, ...] = ()
    fusion_threshold_bytes: int = 64 << 20
    cycle_time: timedelta = timedelta(milliseconds=1)
    cache_capacity: int = 8192
    autotune: bool = False
    autotune_log: Path | None = None
    horovod_binding: str = "auto"
    shm_capacity_bytes: int | None = None
    shm_staging_bytes: int = 1 << 20
    tcp_connections: int = 2
    tls: bool = False
    durable: DurableOptions | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read `environ` (default: this process's environment).

        Raises:
            ConfigurationError: a value cannot be read; names the variable and what is accepted.
        """
        env = os.environ if environ is None else environ
        default = cls()
        capacity = non_negative(env, "UNIDIST_SHM_CAPACITY_BYTES", 0)
        fusion = first_set(env, "UNIDIST_FUSION_THRESHOLD_BYTES", "HOROVOD_FUSION_THRESHOLD")
        start_timeout = first_set(env, "UNIDIST_START_TIMEOUT_SEC", "HOROVOD_START_TIMEOUT")
        mark_cycles = first_set(env, "UNIDIST_TIMELINE_MARK_CYCLES", "HOROVOD_TIMELINE_MARK_CYCLES")
        autotune_log = first_set(env, "UNIDIST_AUTOTUNE_LOG", "HOROVOD_AUTOTUNE_LOG")
        stall_check, stall_shutdown = stall_times(env)
        return cls(
            engine=env.get("UNIDIST_ENGINE") or "auto",
            strategy=env.get("UNIDIST_STRATEGY", ""),
            allreduce_algorithm=env.get("UNIDIST_ALLREDUCE_ALGORITHM") or None,
            hierarchical=integer(env, "UNIDIST_HIERARCHICAL", 1) > 0,
            timeout=seconds(env, "UNIDIST_TIMEOUT_SEC", default.timeout),
            start_timeout=seconds(env, start_timeout, default.start_timeout),
            heartbeat=seconds(env, "UNIDIST_HEARTBEAT_SEC", default.heartbeat),
            elastic_timeout=elastic_timeout(env),
            stall_check=stall_check,
            stall_shutdown=stall_shutdown,
            deadlock=seconds(env, "UNIDIST_DEADLOCK_SEC", default.deadlock, zero_allowed=True),
            verify=Verify.parse(env.get("UNIDIST_VERIFY") or "first", "UNIDIST_VERIFY"),
            on_nonfinite=choice(env, "UNIDIST_ON_NONFINITE", ("off", "error", "skip")),
            timeline=_timeline(env),
            timeline_mark_cycles=integer(env, mark_cycles, 0) > 0,
            timeline_per_tensor=integer(env, "UNIDIST_TIMELINE_PER_TENSOR", integer(env, "UNIDIST_AS_HOROVOD", 0)) > 0,
            disabled_plugins=tuple(name for name in env.get("UNIDIST_DISABLE_PLUGINS", "").split(",") if name),
            fusion_threshold_bytes=non_negative(env, fusion, default.fusion_threshold_bytes),
            cycle_time=timedelta(
                milliseconds=real(env, first_set(env, "UNIDIST_CYCLE_TIME_MS", "HOROVOD_CYCLE_TIME"), 1.0)
            ),
            cache_capacity=_cache_capacity(env, default.cache_capacity),
            autotune=integer(env, first_set(env, "UNIDIST_AUTOTUNE", "HOROVOD_AUTOTUNE"), 0) > 0,
            autotune_log=Path(env[autotune_log]) if env.get(autotune_log) else None,
            horovod_binding=env.get("UNIDIST_HOROVOD_BINDING") or default.horovod_binding,
            shm_capacity_bytes=capacity or None,
            shm_staging_bytes=non_negative(env, "UNIDIST_SHM_STAGING_BYTES", default.shm_staging_bytes),
            tcp_connections=_tcp_connections(env, default.tcp_connections),
            tls=integer(env, "UNIDIST_TLS", 0) > 0,
            durable=_durable(env),
        )


@contextmanager
def set_variables(variables: Mapping[str, str], *, keep: bool = False) -> Iterator[None]:
    """Set variables of this process for a while; not thread-safe, as the process environment is not.

    Args:
        variables: to set.
        keep: leave those alone that are set already.
    """
    if keep:
        variables = {name: value for name, value in variables.items() if name not in os.environ}
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


def configure_logging(environ: Mapping[str, str] | None = None) -> None:
    """Set the level of the `unidist` loggers from UNIDIST_LOG_LEVEL.

    A script that configures logging owns where the lines go; for one that does not, they go to standard error, with
    the time if UNIDIST_LOG_TIMESTAMP asks for it.
    """
    env = os.environ if environ is None else environ
    logger = logging.getLogger("unidist")
    name = first_set(env, "UNIDIST_LOG_LEVEL", "HOROVOD_LOG_LEVEL")
    text = env.get(name, "").lower()
    problems = []
    if text and text not in LOG_LEVELS:
        problem = f"{name}={env[name]!r}; choices: {', '.join(LOG_LEVELS)}"
        if not name.startswith("HOROVOD_"):
            raise ConfigurationError(problem)
        problems.append(problem)
        text = ""
    try:
        timestamp = _log_timestamp(env)
    except ConfigurationError as exc:
        if env.get("UNIDIST_LOG_TIMESTAMP"):
            raise
        problems.append(str(exc))
        timestamp = False
    for problem in problems:  # Horovod's settings of its log end no job
        logger.warning("%s. Taken as not set.", problem)
    if not text and not timestamp:
        return
    if text:
        logger.setLevel(LOG_LEVELS[text])
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"{'%(asctime)s ' if timestamp else ''}%(name)s: %(message)s"))
        logger.addHandler(handler)


def _log_timestamp(env: Mapping[str, str]) -> bool:
    if env.get("UNIDIST_LOG_TIMESTAMP"):
        return integer(env, "UNIDIST_LOG_TIMESTAMP", 0) > 0
    return bool(env.get("HOROVOD_LOG_HIDE_TIME")) and integer(env, "HOROVOD_LOG_HIDE_TIME", 1) == 0


def stall_times(env: Mapping[str, str]) -> tuple[timedelta, timedelta]:
    """Return the ages at which a waiting operation is reported and at which it ends the job; zero: never."""
    check = first_set(env, "UNIDIST_STALL_CHECK_SEC", "HOROVOD_STALL_CHECK_TIME_SECONDS")
    shutdown = first_set(env, "UNIDIST_STALL_SHUTDOWN_SEC", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS")
    times = (
        seconds(env, check, Settings.stall_check, zero_allowed=True),
        seconds(env, shutdown, Settings.stall_shutdown, zero_allowed=True),
    )
    if integer(env, "HOROVOD_STALL_CHECK_DISABLE", 0) > 0:
        # It switches off Horovod's times, not ours: a variable of ours wins over any of Horovod's.
        none = timedelta(0)
        return (times[0] if env.get("UNIDIST_STALL_CHECK_SEC") else none), (
            times[1] if env.get("UNIDIST_STALL_SHUTDOWN_SEC") else none
        )
    return times


def elastic_timeout(env: Mapping[str, str]) -> timedelta:
    """Return the longest wait of a process for a world that takes it in."""
    name = first_set(env, "UNIDIST_ELASTIC_TIMEOUT_SEC", "HOROVOD_ELASTIC_TIMEOUT")
    return seconds(env, name, Settings.elastic_timeout)


def _durable(env: Mapping[str, str]) -> DurableOptions | None:
    if not env.get("UNIDIST_CHECKPOINT_DIR"):
        return None
    interval = interval_of(env.get("UNIDIST_CHECKPOINT_INTERVAL_SEC") or AUTO)
    keep = integer(env, "UNIDIST_CHECKPOINT_KEEP", DurableOptions.keep)
    return DurableOptions(Path(os.path.abspath(env["UNIDIST_CHECKPOINT_DIR"])), interval, keep)


def _timeline(env: Mapping[str, str]) -> Path | None:
    text = env.get("UNIDIST_TIMELINE") or env.get("HOROVOD_TIMELINE", "")
    return Path(text) if text and text != "DYNAMIC" else None


def _tcp_connections(env: Mapping[str, str], default: int) -> int:
    number = integer(env, "UNIDIST_TCP_CONNECTIONS", default)
    if not 1 <= number <= MAX_TCP_CONNECTIONS:
        raise ConfigurationError(f"UNIDIST_TCP_CONNECTIONS={number}; choices: 1 to {MAX_TCP_CONNECTIONS}")
    return number


def _cache_capacity(env: Mapping[str, str], default: int) -> int:
    name = first_set(env, "UNIDIST_CACHE_CAPACITY", "HOROVOD_CACHE_CAPACITY")
    capacity = non_negative(env, name, default)
    if capacity > MAX_CACHE_CAPACITY:
        if name.startswith("HOROVOD_"):  # there it is a wish; `unidist launch` warns
            return MAX_CACHE_CAPACITY
        raise ConfigurationError(f"{name}={capacity} is more than {MAX_CACHE_CAPACITY}, the largest that is possible")
    return capacity
