"""The list of processes beside the ranks, without processes."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from unidist.errors import ConfigurationError
from unidist.launcher import Job, SideProcess
from unidist_launch.side_processes.roster import HOST_LOST, NOT_STARTED, SideReports, SideRoster, drive_to_end


class Launcher:
    """Hosts that note what they are told, and what the roster reports."""

    def __init__(self, *processes: SideProcess, may_grow: bool = False, **more: Any) -> None:
        self.started: list[tuple[int, str]] = []
        self.signals: list[tuple[int, int, list[int]]] = []
        self.messages: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.exited: list[tuple[int, int]] = []
        self.failures: list[str] = []
        self.ends: list[tuple[str, str]] = []
        job = Job(("true",), 1, side_processes=processes, **more)
        self.roster = SideRoster(
            job,
            self,
            SideReports(
                self.messages.append,
                lambda event, **fields: self.events.append((event, fields)),
                lambda number, code: self.exited.append((number, code)),
                self.failures.append,
                lambda name, reason: self.ends.append((name, reason)),
            ),
            may_grow=may_grow,
        )

    def start_side(self, host: int, number: int, process: SideProcess) -> None:
        self.started.append((host, process.name))
        self.roster.side_started(number, 100 + number)

    def signal_side(self, host: int, number: int, chosen: Sequence[int]) -> None:
        self.signals.append((host, number, list(chosen)))


def server(index: int = 0, **more: Any) -> SideProcess:
    return SideProcess(("server",), "ps", index, **more)


def test_processes_are_spread_over_the_hosts_but_for_those_that_want_one() -> None:
    launcher = Launcher(server(0), server(1, host=0), server(2), server(3))
    launcher.roster.place([5, 7])
    assert launcher.started == [(5, "ps 0"), (5, "ps 1"), (7, "ps 2"), (5, "ps 3")]
    assert launcher.events[0] == ("side_started", {"pid": 100, "role": "ps", "index": 0, "host": 5, "number": 0})
    launcher.roster.place([5, 7])
    assert len(launcher.started) == 4, "none is started twice"


def test_a_host_that_there_is_not() -> None:
    launcher = Launcher(server(host=2))
    with pytest.raises(ConfigurationError, match=r"ps 0 is to run on host 2, and the job has 2 host\(s\)"):
        launcher.roster.check_hosts(2)
    launcher = Launcher(may_grow=True)
    launcher.roster.place([1])
    assert launcher.roster.start(server(host=1)) == 0
    assert not launcher.started
    launcher.roster.place([1, 4])
    assert launcher.started == [(4, "ps 0")]


def test_whole_lines_are_shown_with_their_label(tmp_path: Path) -> None:
    launcher = Launcher(server(), server(1, label="other"), output_dir=tmp_path)
    launcher.roster.place([0])
    launcher.roster.side_printed(0, b"half")
    launcher.roster.side_printed(0, b" a line\n10 %\r20 %\nlast")
    launcher.roster.side_printed(1, b"mine\n")
    assert launcher.messages == ["[ps 0] half a line", "[ps 0] 20 %", "[other] mine"]
    launcher.roster.conclude(keeps=False)
    launcher.roster.side_ended(0, 0)
    assert launcher.messages[-1] == "[ps 0] last"
    launcher.roster.close()
    assert (tmp_path / "ps.0" / "output").read_bytes() == b"half a line\n10 %\r20 %\nlast"


def test_an_end_that_nobody_asked_for_is_told_and_may_end_the_job() -> None:
    launcher = Launcher(server(), server(1, is_vital=True), server(2, is_vital=True))
    launcher.roster.place([0])
    launcher.roster.side_ended(0, 3)
    assert "ps 0 has ended before the ranks (host 0, pid 100): exit code 3" in launcher.messages[-1]
    launcher.roster.side_ended(2, 0)
    assert "ps 2 has ended before the ranks" in launcher.messages[-1]
    assert launcher.ends == [("ps 0", "exit code 3"), ("ps 2", "exit code 0")]
    assert not launcher.failures
    launcher.roster.host_lost(0, "silence")
    assert launcher.failures == ["the job has ended: ps 1 has failed (host 0, pid 101): its host was lost: silence"]
    assert launcher.events[-1][1]["returncode"] == HOST_LOST
    assert launcher.roster.is_empty


def test_observers_are_told_of_theirs_in_the_next_turn() -> None:
    launcher = Launcher()
    launcher.roster.place([0])
    number = launcher.roster.start(server())
    launcher.roster.side_ended(number, 3)
    assert not launcher.exited
    assert not launcher.roster.is_empty
    launcher.roster.turn()
    assert launcher.exited == [(number, 3)]
    assert not launcher.messages, "the observer says what there is to say"
    refused = launcher.roster.start(server())
    launcher.roster.side_refused(refused, "no such program")
    launcher.roster.turn()
    assert launcher.exited[-1] == (refused, NOT_STARTED)
    assert launcher.messages == ["unidist: no such program"]


def test_a_process_is_asked_to_end_and_then_killed() -> None:
    launcher = Launcher(server(), grace_period=timedelta(0))
    launcher.roster.place([0])
    launcher.roster.end(0)
    launcher.roster.end(0)
    assert launcher.signals == [(0, signal.SIGTERM, [0])]
    launcher.roster.turn()
    assert launcher.signals[-1] == (0, signal.SIGKILL, [0])
    launcher.roster.side_ended(0, -9)
    assert not launcher.messages
    assert not launcher.failures


def test_what_waits_for_a_host_just_goes() -> None:
    launcher = Launcher(may_grow=True)
    number = launcher.roster.start(server())
    launcher.roster.end(number)
    launcher.roster.turn()
    assert launcher.exited == [(number, -signal.SIGTERM)]
    assert launcher.roster.is_empty


def test_at_the_end_those_of_observers_may_stay_until_a_signal_comes() -> None:
    launcher = Launcher(server())
    launcher.roster.place([0])
    mine = launcher.roster.start(server(1))
    signals: list[int] = []
    turns: list[int] = []

    def turn() -> None:
        turns.append(len(launcher.signals))
        if len(turns) == 1:
            launcher.roster.side_ended(0, 0)
        elif len(turns) == 2:
            signals.append(signal.SIGINT)
        elif len(turns) == 4:
            launcher.roster.side_ended(mine, -15)

    drive_to_end(launcher.roster, turn=turn, finishing=lambda: True, signals=signals)
    assert launcher.signals == [(0, signal.SIGTERM, [0]), (0, signal.SIGTERM, [mine])]
    assert ("interrupted", {"signal": "SIGINT"}) in launcher.events
    assert turns == [1, 1, 2, 2]


@pytest.mark.parametrize("wrong", [{"command": ()}, {"role": "a b"}, {"index": -1}, {"host": -1}])
def test_processes_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="side process"):
        SideProcess(**{"command": ("true",), "role": "ps", **wrong})
