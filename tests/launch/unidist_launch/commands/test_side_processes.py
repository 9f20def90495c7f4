"""Jobs with processes beside their ranks that `unidist launch` refuses before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unidist.engine import Availability
from unidist.errors import ConfigurationError
from unidist.launcher import ElasticLimits, Job, JobObserver, Launcher, SideProcess, StartsSideProcesses
from unidist_launch.commands.launch import _check_side_processes

SERVER = SideProcess(("server",), "ps")


class Plain(Launcher):
    """Starts ranks alone."""

    def availability(self) -> Availability:
        return Availability(True)

    def run(self, job: Job) -> int:
        raise AssertionError("it is refused before")


class Starting(Plain, StartsSideProcesses):
    """Starts others, too."""


class Observer(JobObserver):
    """Starts some later."""

    starts_processes = True


@pytest.mark.parametrize("more", [{"side_processes": (SERVER,)}, {"observers": (Observer(),)}])
def test_a_launcher_that_starts_ranks_alone_does_not_forget_the_others(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="launcher 'plain' starts ranks alone"):
        _check_side_processes(Job(("train",), 2, **more), "plain", Plain())
    _check_side_processes(Job(("train",), 2, **more), "starting", Starting())
    _check_side_processes(Job(("train",), 2), "plain", Plain())


def test_servers_end_with_a_launcher_that_another_one_would_follow() -> None:
    limits = ElasticLimits(1, 2, state_dir=Path("state"))
    with pytest.raises(ConfigurationError, match="--state-dir: a launcher that takes over does not find ps 0 again"):
        _check_side_processes(Job(("train",), 2, elastic=limits, side_processes=(SERVER,)), "starting", Starting())
    _check_side_processes(Job(("train",), 2, elastic=limits, observers=(Observer(),)), "starting", Starting())
