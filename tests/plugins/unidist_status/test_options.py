"""The options of the status page, and what the launcher says of its events."""

from __future__ import annotations

from typing import Any

import pytest

from unidist.errors import ConfigurationError
from unidist.launcher import StatusPage
from unidist.settings.environment import Settings
from unidist_launch.elastic_job.report import line
from unidist_launch.options import elastic_options


def given(**options: Any) -> dict[str, Any]:
    """Return the values of all elastic options where only these were given."""

    def command() -> None: ...

    for decorator in elastic_options.OPTIONS:
        command = decorator(command)
    return {parameter.name: None for parameter in command.__click_params__} | options


def page(**options: Any) -> StatusPage | None:
    return elastic_options.limits(given(min_np=1, **options), 2, (), Settings()).status


def test_there_is_a_page_when_a_port_is_given() -> None:
    assert page() is None
    assert page(status_port=0) == StatusPage(0, address="127.0.0.1", token_file=None, file=None)


def test_other_options_of_the_page_need_the_port() -> None:
    with pytest.raises(ConfigurationError, match="--status-address is for the status page; give --status-port"):
        page(status_address="::1")


def test_the_page_is_for_elastic_jobs() -> None:
    assert not elastic_options.is_elastic(given())
    with pytest.raises(ConfigurationError, match="--status-port is for elastic jobs; give --min-np"):
        elastic_options.is_elastic(given(status_port=0))


def test_what_was_asked_for_and_how_long_a_recovery_took_is_told() -> None:
    asked = {"action": "kill", "worker": 3, "rank": None, "client": "::1"}
    assert line("asked", asked).startswith("worker 3: is killed, as ::1")
    phases = {"detect_sec": None, "reform_sec": 0.25, "restore_sec": None, "first_step_sec": 1.0}
    told = line("recovered", {"generation": 2, **phases})
    assert told == "generation 2 trains: formed anew in 0.250 s, first step in 1.000 s"
