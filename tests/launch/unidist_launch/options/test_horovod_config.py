"""Sections of Horovod's configuration files as flags."""

from __future__ import annotations

from typing import Any

import pytest

from unidist.errors import ConfigurationError
from unidist_launch.options.horovod_config import flags


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"params": {"cycle_time_ms": 3}}, [("cycle-time-ms", 3)]),
        ({"params": {"cache-capacity": 0, "cycle_time_ms": None}}, [("cache-capacity", 0)]),
        (
            {"timeline": {"filename": "t", "mark_cycles": True}},
            [("timeline-filename", "t"), ("timeline-mark-cycles", True)],
        ),
        ({"timeline": "t"}, [("timeline", "t")]),
        ({"stall_check": {"enabled": True, "warning_time_seconds": 5}}, [("stall-check-warning-time-seconds", 5)]),
        ({"stall-check": {"enabled": False, "warning_time_seconds": 5}}, [("no-stall-check", True)]),
        ({"stall_check": 5}, [("stall_check", 5)]),
        ({"autotune": {"enabled": True, "log_file": "x"}}, [("autotune", True), ("autotune-log-file", "x")]),
        ({"autotune": {"enabled": False, "log_file": "x"}}, [("autotune", False)]),
        ({"library_options": {"gloo_timeout_seconds": 9}}, [("gloo-timeout-seconds", 9)]),
        ({"logging": {"level": "INFO"}}, [("log-level", "INFO")]),
        ({"controller": "MPI", "num_proc": 2}, [("mpi", True), ("num_proc", 2)]),
    ],
)
def test_a_sections_keys_are_the_flags_of_horovodrun(content: dict[str, Any], expected: list[tuple[str, Any]]) -> None:
    assert list(flags(content)) == expected


@pytest.mark.parametrize(
    "content", [{"controller": "nccl"}, {"params": {"enabled": True}}, {"stall_check": {"enabled": "no"}}]
)
def test_what_horovod_does_not_know_is_an_error(content: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        list(flags(content))
