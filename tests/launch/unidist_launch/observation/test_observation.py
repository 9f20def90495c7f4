"""What observers of a job are told, and that one which fails harms itself only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist.launcher import Job, JobObserver, ObservedJob, SideProcess
from unidist_launch.observation.event_log import EventLog
from unidist_launch.observation.observation import Observation
from unidist_launch.output.lines import Stream
from unidist_launch.output.writer import Output
from unidist_launch.side_processes.roster import SideReports, SideRoster


class Diary(JobObserver):
    """Writes down what it is told."""

    def __init__(self, *, wants_output: bool = False) -> None:
        self.wants_output = wants_output
        self.entries: list[object] = []

    @override
    def start(self, job: ObservedJob) -> None:
        self.job = job
        self.entries.append((job.command, job.num_proc))

    @override
    def happened(self, event: str, fields: Mapping[str, Any]) -> None:
        self.entries.append((event, dict(fields)))
        if event == "lost":
            self.job.publish("noticed", rank=fields["rank"])

    @override
    def printed(self, seat: int, lines: Any) -> None:
        self.entries.append((seat, list(lines)))

    @override
    def turn(self) -> None:
        self.job.signal(3, 9)

    @override
    def summary(self) -> str:
        return f"{len(self.entries)} entries"

    @override
    def close(self) -> None:
        self.entries.append("closed")


class Broken(JobObserver):
    """Raises when something happens."""

    @override
    def happened(self, event: str, fields: Mapping[str, Any]) -> None:
        raise KeyError(event)


class Refusing(Diary):
    """Cannot do what it was asked for."""

    @override
    def start(self, job: ObservedJob) -> None:
        raise ConfigurationError("no bell here")


def observe(
    stack: ExitStack, *observers: JobObserver, signals: list[tuple[int, int]] | None = None
) -> tuple[EventLog, Output, Observation]:
    log, output = EventLog(None), stack.enter_context(Output(2, output_dir=None, quiet=False, give_up=lambda: False))
    job = Job(("train",), 2, observers=observers)

    def send(worker: int, number: int) -> None:
        if signals is not None:
            signals.append((worker, number))

    return log, output, Observation(job, log, output, send, stack)


def test_an_observer_is_told_of_events_and_lines_and_may_publish_and_signal() -> None:
    signals: list[tuple[int, int]] = []
    listening, deaf = Diary(wants_output=True), Diary()
    with ExitStack() as stack:
        log, output, observation = observe(stack, listening, deaf, signals=signals)
        log.publish("lost", rank=1)
        output.feed(1, Stream.STDOUT, b"hello\n")
        observation.turn()
        assert observation.summary() == "5 entries"
    told = [(("train",), 2), ("lost", {"rank": 1}), ("noticed", {"rank": 1}), ("noticed", {"rank": 1})]
    assert listening.entries == [*told, (1, [b"hello"]), "closed"]
    assert (1, [b"hello"]) not in deaf.entries
    assert signals == [(3, 9), (3, 9)]


def test_an_observer_that_raises_is_dropped_with_a_warning(capfd: pytest.CaptureFixture[str]) -> None:
    diary = Diary()
    with ExitStack() as stack:
        log, _, _ = observe(stack, Broken(), diary)
        log.publish("joined")
        log.publish("joined")
    assert diary.entries.count(("joined", {})) == 2
    assert capfd.readouterr().err.count("Broken is dropped, for it raised KeyError: 'joined'") == 1


def test_an_observer_that_cannot_do_what_it_was_asked_for_ends_the_job_and_is_closed() -> None:
    diary = Refusing()
    with ExitStack() as stack, pytest.raises(ConfigurationError, match="no bell here"):
        observe(stack, diary)
    assert diary.entries == ["closed"]


class Starter(Diary):
    """Starts a process beside the ranks."""

    starts_processes = True

    @override
    def turn(self) -> None:
        self.number = self.job.start_process(SideProcess(("server",), "data"))

    @override
    def process_exited(self, number: int, returncode: int) -> None:
        self.entries.append((number, returncode))

    @override
    def finishing(self) -> bool:
        return "done" not in self.entries


class Hosts:
    """Starts nothing, and says that it has failed."""

    roster: SideRoster

    def start_side(self, host: int, number: int, process: SideProcess) -> None:
        self.roster.side_refused(number, "no such program")

    def signal_side(self, host: int, number: int, chosen: Sequence[int]) -> None:
        raise AssertionError("nothing runs")


def test_an_observer_starts_processes_and_is_told_of_their_end(capfd: pytest.CaptureFixture[str]) -> None:
    starter, other = Starter(), Diary()
    with ExitStack() as stack:
        _, output, observation = observe(stack, starter, other)
        hosts = Hosts()
        ignored: Any = lambda *_: None  # noqa: E731
        reports = SideReports(output.message, observation.publish, observation.process_exited, ignored, ignored)
        hosts.roster = SideRoster(Job(("train",), 2), hosts, reports)
        observation.attach(hosts.roster, lambda: pytest.fail("nobody asks for values"))
        hosts.roster.place([0])
        observation.turn()
        assert observation.finishing()
        hosts.roster.turn()
        assert (starter.number, 127) in starter.entries
        starter.entries.append("done")
        assert not observation.finishing()
    assert "unidist: no such program" in capfd.readouterr().err


def test_an_observer_that_has_not_said_that_it_starts_processes_starts_none(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Sudden(Starter):
        starts_processes = False

    with ExitStack() as stack:
        _, _, observation = observe(stack, Sudden())
        observation.turn()
    assert "starts_processes = True" in capfd.readouterr().err
