"""Reading the environment: the contracts of five launchers, and the user's settings."""

from __future__ import annotations

import logging
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from unidist.environment import HOROVOD_VARIABLES, VARIABLES, Settings, configure_logging, read_placement, set_variables
from unidist.errors import ConfigurationError
from unidist.rendezvous import MeetingPlace
from unidist.topology import Topology

ROOT = Path(__file__).parents[2]

UNIDIST = {
    "UNIDIST_RANK": "5",
    "UNIDIST_WORLD_SIZE": "8",
    "UNIDIST_LOCAL_RANK": "1",
    "UNIDIST_LOCAL_WORLD_SIZE": "4",
    "UNIDIST_NODE_RANK": "1",
    "UNIDIST_NUM_NODES": "2",
    "UNIDIST_JOB_ID": "abc",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "1",
}
HOROVODRUN = {
    "HOROVOD_RANK": "5",
    "HOROVOD_SIZE": "8",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "4",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "77",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_ID": "9",
    "SLURM_STEP_ID": "0",
}
ENV = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("source", "env"),
    [
        ("unidist", UNIDIST),
        ("torchrun", TORCHRUN),
        ("horovodrun", HOROVODRUN),
        ("mpirun", OPEN_MPI),
        ("mpirun", MPICH),
        ("srun", SRUN),
        ("env://", ENV),
    ],
)
def test_every_launchers_variables_give_the_same_place(source: str, env: dict[str, str]) -> None:
    placement = read_placement(env)
    assert placement.source == source
    assert placement.topology == Topology(rank=5, world_size=8, local_rank=1, local_size=4, node_rank=1, num_nodes=2)
    assert placement.job_key


def test_without_a_launcher_there_is_one_process() -> None:
    placement = read_placement({})
    assert (placement.topology, placement.source, placement.secret) == (Topology(), "none", b"")


def test_a_slurm_allocation_without_a_step_of_several_tasks_is_one_process() -> None:
    assert read_placement({"SLURM_PROCID": "0", "SLURM_JOB_ID": "9"}).source == "none"
    assert read_placement({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}).source == "none"


def test_our_variables_win_over_those_that_the_launcher_exports_for_others() -> None:
    placement = read_placement(
        {**TORCHRUN, **HOROVODRUN, **SRUN, **UNIDIST, "UNIDIST_RANK": "6", "UNIDIST_LOCAL_RANK": "2"}
    )
    assert (placement.source, placement.topology.rank) == ("unidist", 6)


def test_jobs_have_different_keys() -> None:
    assert read_placement(UNIDIST).job_key != read_placement({**UNIDIST, "UNIDIST_JOB_ID": "abd"}).job_key
    assert read_placement(TORCHRUN).job_key != read_placement({**TORCHRUN, "MASTER_PORT": "2"}).job_key


def test_one_host_is_assumed_when_nothing_tells_local_sizes() -> None:
    topology = read_placement({"RANK": "3", "WORLD_SIZE": "4"}).topology
    assert topology == Topology(rank=3, world_size=4, local_rank=3, local_size=4)
    assert topology.single_host


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"UNIDIST_RANK": "0"}, "UNIDIST_WORLD_SIZE is not set"),
        ({"RANK": "0"}, "WORLD_SIZE is not set, though other variables are set by env://"),
        ({**ENV, "RANK": "x"}, "RANK='x' is not a whole number"),
        ({**ENV, "RANK": "8"}, "rank=8 with world_size=8"),
        ({**ENV, "WORLD_SIZE": "0"}, "world_size=0"),
        ({**ENV, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0: a host has at least 1"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS='many'"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "?"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({**UNIDIST, "UNIDIST_SECRET_FD": "987"}, "UNIDIST_SECRET_FD=987 is not open"),
    ],
)
def test_what_contradicts_itself_is_a_configuration_error(env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_placement(env)


def test_the_secret_is_read_from_its_descriptor_and_from_no_other_file(tmp_path: Path) -> None:
    secret = secrets.token_bytes(32)
    descriptor = os.memfd_create("unidist-secret")
    try:
        os.write(descriptor, secret)
        assert read_placement({**UNIDIST, "UNIDIST_SECRET_FD": str(descriptor)}).secret == secret
    finally:
        os.close(descriptor)
    with open(tmp_path / "other", "w+b") as file, pytest.raises(ConfigurationError):
        read_placement({**UNIDIST, "UNIDIST_SECRET_FD": str(file.fileno())})


def test_settings_have_defaults() -> None:
    assert Settings.read({}) == Settings()


def test_settings_are_read_with_their_units() -> None:
    settings = Settings.read(
        {
            "UNIDIST_ENGINE": "shm",
            "UNIDIST_STRATEGY": "zero=2",
            "UNIDIST_ALLREDUCE_ALGORITHM": "ring",
            "UNIDIST_TIMEOUT_SEC": "1.5",
            "UNIDIST_START_TIMEOUT_SEC": "2",
            "UNIDIST_STALL_CHECK_SEC": "0",
            "UNIDIST_STALL_SHUTDOWN_SEC": "90",
            "UNIDIST_TIMELINE": "/x/t.%r.json",
            "UNIDIST_TIMELINE_MARK_CYCLES": "1",
            "UNIDIST_DISABLE_PLUGINS": "a,,b",
            "UNIDIST_FUSION_THRESHOLD_BYTES": "0",
            "UNIDIST_CYCLE_TIME_MS": "2.5",
            "UNIDIST_CACHE_CAPACITY": "0",
            "UNIDIST_SHM_CAPACITY_BYTES": "4096",
            "UNIDIST_SHM_STAGING_BYTES": "8192",
        }
    )
    assert settings == Settings(
        engine="shm",
        strategy="zero=2",
        allreduce_algorithm="ring",
        timeout=timedelta(seconds=1.5),
        start_timeout=timedelta(seconds=2),
        stall_check=timedelta(0),
        stall_shutdown=timedelta(seconds=90),
        timeline=Path("/x/t.%r.json"),
        timeline_mark_cycles=True,
        disabled_plugins=("a", "b"),
        fusion_threshold_bytes=0,
        cycle_time=timedelta(milliseconds=2.5),
        cache_capacity=0,
        shm_capacity_bytes=4096,
        shm_staging_bytes=8192,
    )


def test_empty_variables_mean_the_default() -> None:
    names = [
        name for name in VARIABLES if name not in UNIDIST and name not in ("UNIDIST_SECRET_FD", "UNIDIST_LAUNCHER_PID")
    ]
    assert Settings.read(dict.fromkeys([*names, *HOROVOD_VARIABLES], "")) == Settings()


HOROVOD_SETTINGS = [
    ({"HOROVOD_TIMELINE": "/x/t.json"}, Settings(timeline=Path("/x/t.json"))),
    ({"HOROVOD_TIMELINE": "DYNAMIC"}, Settings()),
    ({"HOROVOD_TIMELINE_MARK_CYCLES": "1"}, Settings(timeline_mark_cycles=True)),
    ({"HOROVOD_FUSION_THRESHOLD": "1024"}, Settings(fusion_threshold_bytes=1024)),
    ({"HOROVOD_CYCLE_TIME": "3.5"}, Settings(cycle_time=timedelta(milliseconds=3.5))),
    ({"HOROVOD_CACHE_CAPACITY": "0"}, Settings(cache_capacity=0)),
    ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "7"}, Settings(stall_check=timedelta(seconds=7))),
    ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9"}, Settings(stall_shutdown=timedelta(seconds=9))),
    (
        {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9"},
        Settings(stall_check=timedelta(0)),
    ),
    ({"HOROVOD_STALL_CHECK_DISABLE": "0"}, Settings()),
    ({"HOROVOD_START_TIMEOUT": "44"}, Settings(start_timeout=timedelta(seconds=44))),
]


@pytest.mark.parametrize(("env", "settings"), HOROVOD_SETTINGS)
def test_horovods_variables_are_read_where_ours_are_not_set(env: dict[str, str], settings: Settings) -> None:
    assert Settings.read(env) == settings


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ({"UNIDIST_TIMELINE": "a", "HOROVOD_TIMELINE": "b"}, Settings(timeline=Path("a"))),
        ({"UNIDIST_FUSION_THRESHOLD_BYTES": "0", "HOROVOD_FUSION_THRESHOLD": "9"}, Settings(fusion_threshold_bytes=0)),
        ({"UNIDIST_CACHE_CAPACITY": "5", "HOROVOD_CACHE_CAPACITY": "6"}, Settings(cache_capacity=5)),
        (
            {"UNIDIST_STALL_CHECK_SEC": "5", "HOROVOD_STALL_CHECK_DISABLE": "1"},
            Settings(stall_check=timedelta(seconds=5)),
        ),
        ({"UNIDIST_TIMELINE_MARK_CYCLES": "0", "HOROVOD_TIMELINE_MARK_CYCLES": "1"}, Settings()),
    ],
)
def test_our_variables_win_over_horovods(env: dict[str, str], settings: Settings) -> None:
    assert Settings.read(env) == settings


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("UNIDIST_TIMEOUT_SEC", "soon", "is not a number"),
        ("UNIDIST_TIMEOUT_SEC", "0", "above 0"),
        ("UNIDIST_TIMEOUT_SEC", "-1", "give 0 or more"),
        ("UNIDIST_TIMEOUT_SEC", "nan", "give 0 or more"),
        ("UNIDIST_TIMEOUT_SEC", "inf", "give 0 or more"),
        ("UNIDIST_START_TIMEOUT_SEC", "0", "above 0"),
        ("UNIDIST_STALL_CHECK_SEC", "x", "is not a number"),
        ("UNIDIST_FUSION_THRESHOLD_BYTES", "1e6", "is not a whole number"),
        ("UNIDIST_SHM_STAGING_BYTES", "-4", "is negative"),
        ("UNIDIST_CACHE_CAPACITY", "65537", "is more than 65536"),
        ("UNIDIST_TIMELINE_MARK_CYCLES", "yes", "is not a whole number"),
        ("HOROVOD_CYCLE_TIME", "fast", "is not a number"),
        ("HOROVOD_FUSION_THRESHOLD", "-1", "is negative"),
        ("HOROVOD_CACHE_CAPACITY", "65537", "is more than 65536"),
        ("HOROVOD_STALL_CHECK_DISABLE", "true", "is not a whole number"),
        ("HOROVOD_START_TIMEOUT", "0", "above 0"),
    ],
)
def test_a_bad_value_names_its_variable(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        Settings.read({name: value})
    assert name in str(caught.value)


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("unidist")
    level = logger.level
    yield logger
    logger.setLevel(level)


def test_the_log_level_is_set_and_no_handler_added(logger: logging.Logger) -> None:
    handlers = list(logger.handlers)
    configure_logging({"UNIDIST_LOG_LEVEL": "Debug"})
    assert logger.level == logging.DEBUG
    configure_logging({})
    assert logger.level == logging.DEBUG
    assert logger.handlers == handlers
    with pytest.raises(ConfigurationError, match="UNIDIST_LOG_LEVEL='loud'; choices: trace"):
        configure_logging({"UNIDIST_LOG_LEVEL": "loud"})


@pytest.mark.parametrize(
    ("env", "level"),
    [
        ({"HOROVOD_LOG_LEVEL": "TRACE"}, logging.DEBUG),
        ({"HOROVOD_LOG_LEVEL": "fatal"}, logging.CRITICAL),
        ({"UNIDIST_LOG_LEVEL": "error", "HOROVOD_LOG_LEVEL": "debug"}, logging.ERROR),
    ],
)
def test_horovods_log_level_is_taken_where_ours_is_not_set(
    logger: logging.Logger, env: dict[str, str], level: int
) -> None:
    configure_logging(env)
    assert logger.level == level


@pytest.mark.parametrize(
    ("env", "with_time"),
    [
        ({"UNIDIST_LOG_TIMESTAMP": "1"}, True),
        ({"HOROVOD_LOG_HIDE_TIME": "0"}, True),
        ({"HOROVOD_LOG_HIDE_TIME": "1", "UNIDIST_LOG_LEVEL": "info"}, False),
        ({"UNIDIST_LOG_TIMESTAMP": "0", "HOROVOD_LOG_HIDE_TIME": "0", "UNIDIST_LOG_LEVEL": "info"}, False),
    ],
)
def test_log_lines_begin_with_the_time_when_asked(env: dict[str, str], with_time: bool) -> None:
    code = "from unidist.environment import configure_logging; import logging; configure_logging(); "
    code += "logging.getLogger('unidist.x').warning('hello')"
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("UNIDIST_", "HOROVOD_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=bare | env, capture_output=True, text=True, timeout=60, check=True
    )
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} " if with_time else ""
    assert re.fullmatch(time + r"unidist\.x: hello\n", done.stderr)


def test_the_docs_name_every_variable() -> None:
    text = (ROOT / "docs" / "environment.md").read_text()
    assert [name for name in {**VARIABLES, **HOROVOD_VARIABLES} if f"`{name}`" not in text] == []


def test_every_variable_that_the_sources_name_is_in_the_table() -> None:
    named: dict[str, str] = {}
    for folder in ("unidist", "adapters", "plugins", "launch"):
        for file in (ROOT / folder).rglob("*.py"):
            named |= dict.fromkeys(re.findall(r"\bUNIDIST_[A-Z][A-Z_]*[A-Z]\b", file.read_text()), str(file))
    assert {name: file for name, file in named.items() if name not in VARIABLES} == {}
    assert len(named) >= len(VARIABLES) - 1


def test_variables_that_are_set_for_a_while_are_what_they_were_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIDIST_ENGINE", "mpi")
    monkeypatch.delenv("UNIDIST_STRATEGY", raising=False)
    with set_variables({"UNIDIST_ENGINE": "shm", "UNIDIST_STRATEGY": "data"}):
        assert (os.environ["UNIDIST_ENGINE"], os.environ["UNIDIST_STRATEGY"]) == ("shm", "data")
    assert os.environ["UNIDIST_ENGINE"] == "mpi"
    assert "UNIDIST_STRATEGY" not in os.environ


def test_a_job_on_several_hosts_is_told_where_to_meet() -> None:
    assert read_placement(UNIDIST).meeting_place is None
    env = {**UNIDIST, "UNIDIST_CONTROL_ADDRESS": "[fe80::1]:77", "UNIDIST_HOST_ADDRESS": "10.0.0.2"}
    place = MeetingPlace(("fe80::1", 77), "10.0.0.2", 3)
    assert read_placement({**env, "UNIDIST_GENERATION": "3"}).meeting_place == place
    for wrong in ("10.0.0.1", "10.0.0.1:x", ":77"):
        with pytest.raises(ConfigurationError, match="is not HOST:PORT"):
            read_placement({**env, "UNIDIST_CONTROL_ADDRESS": wrong})
