"""Reading the environment: the user's settings."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from unidist.errors import ConfigurationError
from unidist.settings.environment import HOROVOD_VARIABLES, VARIABLES, Settings, configure_logging, set_variables

ROOT = Path(__file__).parents[3]


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
    assert Settings.read(dict.fromkeys([*VARIABLES, *HOROVOD_VARIABLES], "")) == Settings()


HOROVOD_SETTINGS = [
    ({"HOROVOD_TIMELINE": "/x/t.json"}, Settings(timeline=Path("/x/t.json"))),
    ({"HOROVOD_TIMELINE": "DYNAMIC"}, Settings()),
    ({"HOROVOD_TIMELINE_MARK_CYCLES": "1"}, Settings(timeline_mark_cycles=True)),
    ({"UNIDIST_AS_HOROVOD": "1"}, Settings(timeline_per_tensor=True)),
    ({"UNIDIST_AS_HOROVOD": "1", "UNIDIST_TIMELINE_PER_TENSOR": "0"}, Settings()),
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
    code = "from unidist.settings.environment import configure_logging; import logging; configure_logging(); "
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


def test_horovods_cache_is_cut_to_what_is_possible() -> None:
    assert Settings.read({"HOROVOD_CACHE_CAPACITY": "65537"}).cache_capacity == 65536
