"""The launcher's list of the processes beside the ranks: where they run, what they print, and how they end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from unidist.control.codec import Message
from unidist.control.messages import SideExit, SideOutput, SideRefused, SideStarted
from unidist.errors import ConfigurationError
from unidist.jobs.processes import describe_exit
from unidist.launcher import Job, SideProcess
from unidist_launch.output.lines import LineSplitter

NOT_STARTED = 127
HOST_LOST = 255
"""Return codes of processes that could not be started, and of those whose host was lost."""

_HOPELESS_SEC = 10.0


class SideHosts(Protocol):
    """The hosts of a job, as the roster uses them."""

    def start_side(self, host: int, number: int, process: SideProcess) -> None:
        """Have a host start a process. The roster is told what became of it (`SideListener`)."""

    def signal_side(self, host: int, number: int, chosen: Sequence[int]) -> None:
        """Have a host send signal `number` to these processes."""


@dataclass(frozen=True)
class SideReports:
    """Callbacks by which the roster reports to its launcher.

    Args:
        message: shows a line.
        publish: adds an event to the job's log.
        process_exited: is told when a process that an observer has started has ended.
        fail: ends the job; given the reason.
        keep_end: keeps, for those who wait for values of the process, that it has ended; given its name and the reason.
    """

    message: Callable[[str], None]
    publish: Callable[..., None]
    process_exited: Callable[[int, int], None]
    fail: Callable[[str], None]
    keep_end: Callable[[str, str], None]


@dataclass(eq=False)
class _Side:
    """A process that is to be started, or runs.

    Args:
        number: of the process.
        wanted: what to start.
        is_observers: an observer has asked for it.
        host: where it runs, or is to be started; None: there is no such host yet.
        is_started: the host was told.
        pid: its process, when the host has told.
        kill_at: it was asked to end, and is killed then.
    """

    number: int
    wanted: SideProcess
    is_observers: bool
    host: int | None = None
    is_started: bool = False
    pid: int = 0
    kill_at: float | None = None
    lines: LineSplitter = field(default_factory=LineSplitter)


class SideRoster:
    """The processes of one job beside its ranks. A `SideListener`.

    Args:
        job: the job, whose processes are started when its hosts are there (`place`).
        hosts: run them.
        reports: is told what happens.
        may_grow: hosts may come later, so a process waits for one; else there is an error.
        reserved: roles whose processes wait for a host of that role (`welcome`), and run on no other.
    """

    def __init__(
        self,
        job: Job,
        hosts: SideHosts,
        reports: SideReports,
        *,
        may_grow: bool = False,
        reserved: Collection[str] = (),
    ) -> None:
        self._reserved = frozenset(reserved)
        self._grace_sec = job.grace_period.total_seconds()
        self._output_dir = job.output_dir
        self._verbose = job.verbose
        self._hosts = hosts
        self._reports = reports
        self._may_grow = may_grow
        self._present: list[int] = []
        self._sides: dict[int, _Side] = {}
        self._files: dict[tuple[str, int], FileIO] = {}
        self._count = 0
        self._num_spread = 0
        self._ended: list[tuple[int, int]] = []
        self._is_over = False
        self.refused: list[str] = []
        """Why processes of the job itself could not be started."""
        self._roles = {wanted.role for wanted in job.side_processes}
        for wanted in job.side_processes:
            self._add(wanted, is_observers=False)

    @property
    def is_empty(self) -> bool:
        """Return whether there are none that run or are to be started, and observers know of all ends."""
        return not self._sides and not self._ended

    @property
    def is_hopeless(self) -> bool:
        """Return whether one hangs in the kernel, where even SIGKILL does not reach it."""
        now = time.monotonic()
        return any(side.kill_at is not None and now > side.kill_at + _HOPELESS_SEC for side in self._sides.values())

    def check_hosts(self, num_hosts: int) -> None:
        """Check that the job's processes have the hosts that they want.

        Raises:
            ConfigurationError: one has not.
        """
        for side in self._sides.values():
            self._check_host(side.wanted, num_hosts)

    def assign(self, present: Sequence[int]) -> None:
        """Choose hosts for what is to be started, of those that are there now, by the launcher's numbers for them."""
        self._present = list(present)
        for side in self._sides.values():
            self._assign(side)

    def host_of(self, wanted: SideProcess) -> int | None:
        """Return where a process runs or is to be started."""
        return next((side.host for side in self._sides.values() if side.wanted is wanted), None)

    def place(self, present: Sequence[int]) -> None:
        """Start what is to be started, on the hosts that are there now, by the launcher's numbers for them."""
        self.assign(present)
        for side in list(self._sides.values()):
            self._start(side)

    def welcome(self, host: int, process: SideProcess, number: int) -> None:
        """A host of a reserved role has come: start the job's processes of that role that are its share, or `process`.

        Args:
            host: the launcher's number for it.
            process: says its role and index; started if the job has no process of the role.
            number: of hosts of the role.
        """
        if process.role not in self._roles:
            side = self._add(process, is_observers=False)
            side.host = host
        for side in list(self._sides.values()):
            is_its = side.wanted.role == process.role and side.wanted.index % max(1, number) == process.index
            if is_its and not side.is_started:
                side.host = host
                self._start(side)

    def start(self, wanted: SideProcess) -> int:
        """Start a process for an observer; see `ObservedJob.start_process`."""
        if not self._may_grow and self._present:
            self._check_host(wanted, len(self._present))
        side = self._add(wanted, is_observers=True)
        if self._present:
            self._assign(side)
            self._start(side)
        return side.number

    def end(self, number: int) -> None:
        """Ask a process to end; see `ObservedJob.end_process`."""
        side = self._sides.get(number)
        if side is None or side.kill_at is not None:
            return
        side.kill_at = time.monotonic() + self._grace_sec
        if side.host is None or not side.is_started:
            self._finish(side, -signal.SIGTERM, "it was not started yet")
        else:
            self._hosts.signal_side(side.host, signal.SIGTERM, [number])

    def conclude(self, *, keeps: bool) -> None:
        """All ranks have ended: end the others. Called again and again until none is left.

        Args:
            keeps: leave those of observers.
        """
        self._is_over = True
        for side in list(self._sides.values()):
            if not (keeps and side.is_observers):
                self.end(side.number)

    def interrupt(self, number: int) -> None:
        """A signal has come after the ranks have ended: what observers wait for is ended as well."""
        self._reports.publish("interrupted", signal=signal.Signals(number).name)

    def hurry(self) -> None:
        """Kill those that were asked to end."""
        for side in self._sides.values():
            if side.kill_at is not None:
                side.kill_at = min(side.kill_at, time.monotonic())

    def turn(self) -> None:
        """Kill what is overdue, and tell observers what has ended."""
        now = time.monotonic()
        for side in self._sides.values():
            if side.kill_at is not None and side.host is not None and side.is_started and now >= side.kill_at:
                self._hosts.signal_side(side.host, signal.SIGKILL, [side.number])
        ended, self._ended = self._ended, []
        for number, returncode in ended:
            self._reports.process_exited(number, returncode)

    def close(self) -> None:
        """Close the files of their output. Idempotent."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    # What hosts tell

    def side_started(self, number: int, pid: int) -> None:
        """A process runs."""
        side = self._sides.get(number)
        if side is not None:
            side.pid = pid
            self._reports.publish("side_started", pid=pid, **self._fields(side))
            if self._verbose:
                self._reports.message(f"unidist: {side.wanted.name} is process {pid}")

    def side_refused(self, number: int, text: str) -> None:
        """A process could not be started."""
        side = self._sides.get(number)
        if side is None:
            return
        if side.is_observers:
            self._reports.message(f"unidist: {text}")
        else:
            self.refused.append(text)
        self._finish(side, NOT_STARTED, text)

    def side_printed(self, number: int, data: bytes) -> None:
        """A process has printed something."""
        side = self._sides.get(number)
        if side is not None:
            self._keep_output(side.wanted, data)
            self._show(side, side.lines.feed(data, time.monotonic()))

    def side_ended(self, number: int, returncode: int) -> None:
        """A process has ended."""
        side = self._sides.get(number)
        if side is not None:
            self._finish(side, returncode, describe_exit(returncode))

    def host_lost(self, host: int, reason: str) -> None:
        """A host is lost, and what ran there with it."""
        self._present = [each for each in self._present if each != host]
        for side in [side for side in self._sides.values() if side.host == host]:
            self._finish(side, HOST_LOST, f"its host was lost: {reason}")

    def vacate(self, host: int) -> None:
        """A host will be taken back: ask what runs there to end."""
        for side in [side for side in self._sides.values() if side.host == host]:
            self.end(side.number)

    def hear(self, message: Message) -> int | None:
        """Take the message of an agent; returns the number of bytes of output that it has, or None if it is another's.

        These are what `SideHost` tells its listener.
        """
        match message:
            case SideOutput(number, data):
                self.side_printed(number, data)
                return len(data)
            case SideStarted(number, pid):
                self.side_started(number, pid)
            case SideRefused(number, text):
                self.side_refused(number, text)
            case SideExit(number, returncode):
                self.side_ended(number, returncode)
            case _:
                return None
        return 0

    # Inside

    def _add(self, wanted: SideProcess, *, is_observers: bool) -> _Side:
        side = _Side(self._count, wanted, is_observers)
        self._sides[self._count] = side
        self._count += 1
        return side

    def _assign(self, side: _Side) -> None:
        if side.host is not None or side.wanted.role in self._reserved:
            return
        index = side.wanted.host
        if index is None:
            index, self._num_spread = self._num_spread % len(self._present), self._num_spread + 1
        if index < len(self._present):
            side.host = self._present[index]

    def _start(self, side: _Side) -> None:
        if side.host is not None and not side.is_started and side.kill_at is None:
            side.is_started = True
            self._hosts.start_side(side.host, side.number, side.wanted)

    @staticmethod
    def _check_host(wanted: SideProcess, num_hosts: int) -> None:
        if wanted.host is not None and wanted.host >= num_hosts:
            raise ConfigurationError(
                f"{wanted.name} is to run on host {wanted.host}, and the job has {num_hosts} host(s), from 0 on"
            )

    def _finish(self, side: _Side, returncode: int, reason: str) -> None:
        del self._sides[side.number]
        self._show(side, side.lines.finish())
        fields = {**self._fields(side), "pid": side.pid, "returncode": returncode, "reason": reason}
        self._reports.publish("side_exited", **fields)
        if side.is_observers:
            self._ended.append((side.number, returncode))
        was_asked = self._is_over or side.kill_at is not None
        if was_asked or returncode == NOT_STARTED:
            return
        self._reports.keep_end(side.wanted.name, reason)
        name, host = side.wanted.name, f"host {side.host}, pid {side.pid}"
        if side.wanted.is_vital and returncode:
            self._reports.fail(f"the job has ended: {name} has failed ({host}): {reason}")
        elif not side.is_observers:
            self._reports.message(f"unidist: {name} has ended before the ranks ({host}): {reason}")

    def _fields(self, side: _Side) -> dict[str, Any]:
        return {"role": side.wanted.role, "index": side.wanted.index, "host": side.host, "number": side.number}

    def _show(self, side: _Side, lines: Sequence[bytes]) -> None:
        for line in lines:
            text = line.rpartition(b"\r")[2].decode(errors="replace")
            self._reports.message(f"[{side.wanted.name}] {text}")

    def _keep_output(self, wanted: SideProcess, data: bytes) -> None:
        """Add to the file of a process's output; one that is started again goes on with it."""
        if self._output_dir is None:
            return
        key = (wanted.role, wanted.index)
        try:
            if key not in self._files:
                folder: Path = self._output_dir / f"{wanted.role}.{wanted.index}"
                folder.mkdir(parents=True, exist_ok=True)
                self._files[key] = FileIO(folder / "output", "wb")
            self._files[key].write(data)
        except OSError as exc:
            self._reports.message(f"unidist: cannot keep what {wanted.name} prints: {exc}; it is on the screen only")
            self._output_dir = None


def drive_to_end(
    roster: SideRoster, *, turn: Callable[[], None], finishing: Callable[[], bool], signals: Sequence[int]
) -> None:
    """End the processes beside the ranks after these have ended.

    Args:
        roster: of the processes.
        turn: one turn of the launcher's loop: it waits for the next event, deals with it, and gives observers theirs.
        finishing: says whether an observer wants to wait for its own.
        signals: that the launcher has got; it grows.
    """
    known, is_interrupted = len(signals), False
    while not roster.is_hopeless:
        keeps = len(signals) == known and finishing()
        if len(signals) > known and not is_interrupted:
            is_interrupted = True
            roster.interrupt(signals[known])
        if roster.is_empty and not keeps:
            return
        roster.conclude(keeps=keeps)
        if len(signals) > 1 and signals[-1] == signal.SIGINT:
            roster.hurry()
        turn()
        roster.turn()


__all__ = ["HOST_LOST", "NOT_STARTED", "SideHosts", "SideReports", "SideRoster", "drive_to_end"]
