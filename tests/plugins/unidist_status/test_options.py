"""The options of the status page, and what the launcher says of its events."""

from __future__ import annotations

import pytest

from unidist.errors import ConfigurationError
from unidist.runtime import PluginManager
from unidist_launch.elastic_job.report import event_line
from unidist_status import options
from unidist_status.options import StatusPage

NONE = {option.name or "": None for option in options.OPTIONS}


def test_there_is_a_page_when_a_port_is_given() -> None:
    assert options.page(NONE) is None
    assert options.page({**NONE, "status_port": 0}) == StatusPage(0, address="127.0.0.1", token_file=None, file=None)


def test_other_options_of_the_page_need_the_port() -> None:
    with pytest.raises(ConfigurationError, match="--status-address is for the status page; give --status-port"):
        options.page({**NONE, "status_address": "::1"})


@pytest.mark.parametrize("is_elastic", [False, True])
def test_every_job_is_watched_for_the_status_line_and_only_with_a_page_for_its_output(is_elastic: bool) -> None:
    assert not options.observer(NONE, is_elastic, PluginManager()).wants_output
    assert options.observer({**NONE, "status_port": 0}, is_elastic, PluginManager()).wants_output


def test_what_was_asked_for_and_how_long_a_recovery_took_is_told() -> None:
    asked = {"action": "kill", "worker": 3, "rank": None, "client": "::1"}
    assert event_line("asked", asked).startswith("worker 3: is killed, as ::1")
    phases = {"detect_sec": None, "reform_sec": 0.25, "restore_sec": None, "first_step_sec": 1.0}
    told = event_line("recovered", {"generation": 2, **phases})
    assert told == "generation 2 trains: formed anew in 0.250 s, first step in 1.000 s"
