"""The observers of one job: tells each what happens, and drops those that raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from typing_extensions import override

from unidist.control.key_values import KeyValues
from unidist.errors import ConfigurationError
from unidist.launcher import Job, JobObserver, ObservedJob, ObservedWorker, SideProcess
from unidist_launch.observation.event_log import EventLog
from unidist_launch.output.lines import Stream
from unidist_launch.output.writer import Output
from unidist_launch.side_processes.roster import SideRoster


class Observation(ObservedJob):
    """Stands between a job and its observers.

    Args:
        job: the job.
        log: whose events observers are told; they publish there too.
        output: of the ranks, whose lines go to the observers that want them.
        send_signal: sends a signal to a worker.
        stack: closes the observers.

    Raises:
        ConfigurationError: an observer cannot do what it was asked for.
    """

    def __init__(
        self, job: Job, log: EventLog, output: Output, send_signal: Callable[[int, int], None], stack: ExitStack
    ) -> None:
        self._job, self._log, self._output, self._send_signal = job, log, output, send_signal
        self._observers: list[JobObserver] = []
        self._stack = stack
        self._roster: SideRoster | None = None
        self._connect: Callable[[], KeyValues] | None = None
        log.listen(self._happened)
        for observer in job.observers:
            self._observers.append(observer)
            stack.callback(self._close, observer)
            self._start(observer)
        if any(observer.wants_output for observer in self._observers):
            output.listen(self._printed)

    @property
    @override
    def command(self) -> tuple[str, ...]:
        return self._job.command

    @property
    @override
    def num_proc(self) -> int:
        return self._job.num_proc

    @property
    @override
    def num_hosts(self) -> int:
        is_found_later = self._job.elastic is not None and self._job.elastic.discovery_script is not None
        return 0 if is_found_later else max(1, len(self._job.hosts))

    @override
    def publish(self, event: str, **fields: Any) -> None:
        self._log.publish(event, **fields)

    @override
    def message(self, text: str) -> None:
        self._output.message(text)

    @override
    def signal(self, worker: int, number: int) -> None:
        self._send_signal(worker, number)

    def attach(self, roster: SideRoster, connect: Callable[[], KeyValues]) -> None:
        """Let observers start processes beside the ranks, and read the values that these share.

        Args:
            roster: of those processes.
            connect: connects to the values.
        """
        self._roster, self._connect = roster, connect

    @override
    def start_process(self, process: SideProcess) -> int:
        self._check_starts_processes()
        assert self._roster is not None, "an observer starts processes after the job has begun"
        return self._roster.start(process)

    @override
    def end_process(self, number: int) -> None:
        assert self._roster is not None, "an observer ends what it has started"
        self._roster.end(number)

    @override
    def values(self) -> KeyValues:
        self._check_starts_processes()
        assert self._connect is not None, "an observer asks for values after the job has begun"
        values = self._connect()
        self._stack.callback(values.close)
        return values

    def _check_starts_processes(self) -> None:
        if not self._job.has_side_processes:
            raise ConfigurationError("an observer that starts processes says so before: starts_processes = True")

    def process_exited(self, number: int, returncode: int) -> None:
        """Tell the observers that a process which one of them has started has ended."""
        self._each(lambda observer: observer.process_exited(number, returncode))

    def finishing(self) -> bool:
        """Return whether an observer wants to wait for its processes after the ranks."""
        found: list[bool] = []
        self._each(lambda observer: found.append(observer.finishing()))
        return any(found)

    def resumed(self, generation: int, workers: Sequence[ObservedWorker]) -> None:
        """Tell the observers which processes were taken over."""
        self._each(lambda observer: observer.resumed(generation, workers))

    def beat(self, worker: int, report: Mapping[str, Any]) -> None:
        """Tell the observers what a worker has reported."""
        self._each(lambda observer: observer.beat(worker, report))

    def progressed(self, worker: int, report: Mapping[str, Any]) -> None:
        """Tell the observers a worker's progress report."""
        self._each(lambda observer: observer.progressed(worker, report))

    def turn(self) -> None:
        """Give the observers their turn."""
        self._each(lambda observer: observer.turn())

    def summary(self) -> str:
        """Return the first summary of an observer; "" if none has one."""
        found: list[str] = []
        self._each(lambda observer: found.append(observer.summary()))
        return next(filter(None, found), "")

    def _happened(self, event: str, fields: dict[str, Any]) -> None:
        self._each(lambda observer: observer.happened(event, fields))

    def _printed(self, seat: int, stream: Stream, lines: list[bytes]) -> None:
        self._each(lambda observer: observer.printed(seat, lines) if observer.wants_output else None)

    def _each(self, call: Callable[[JobObserver], object]) -> None:
        for observer in list(self._observers):
            self._call(observer, call)

    def _start(self, observer: JobObserver) -> None:
        refused: list[ConfigurationError] = []

        def start(observer: JobObserver) -> None:
            try:
                observer.start(self)
            except ConfigurationError as exc:
                refused.append(exc)

        self._call(observer, start)
        if refused:
            raise refused[0]

    def _call(self, observer: JobObserver, call: Callable[[JobObserver], object]) -> None:
        try:
            call(observer)
        except Exception as exc:  # whatever a foreign observer raises: the job does not depend on it
            if observer in self._observers:
                self._observers.remove(observer)
            name = f"{type(observer).__module__}.{type(observer).__qualname__}"
            self._output.message(
                f"unidist: warning: observer {name} is dropped, for it raised {type(exc).__name__}: {exc}"
            )

    def _close(self, observer: JobObserver) -> None:
        if observer in self._observers:
            self._observers.remove(observer)
        self._call(observer, lambda each: each.close())


__all__ = ["Observation"]
