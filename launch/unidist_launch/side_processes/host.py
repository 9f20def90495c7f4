"""The side processes of this host, in somebody's loop: started, read, and noticed when they end."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterable
from functools import partial
from typing import Protocol

from unidist.control import SILENCE_PER_HEARTBEAT, Standstill
from unidist.errors import ConfigurationError
from unidist.jobs.processes import watch_exit
from unidist.jobs.side_processes import SideProcesses
from unidist.launcher import SideProcess

_READ_BYTES = 1 << 16
_MAX_READS = 256
_LAST_OUTPUT_SEC = 1.0
_LAST_OUTPUT_PAUSE_SEC = 0.05


class SideListener(Protocol):
    """Receives the events of side processes, by number."""

    def side_started(self, number: int, pid: int) -> None:
        """It runs."""

    def side_refused(self, number: int, text: str) -> None:
        """It could not be started."""

    def side_printed(self, number: int, data: bytes) -> None:
        """It has printed something."""

    def side_ended(self, number: int, returncode: int) -> None:
        """It has ended, and all that it has printed was told."""


class SideHost:
    """Runs side processes. A selector can wait for it: it is readable when `read` or `collect` has something to do.

    Args:
        processes: of this host; closed by `close`.
        listener: receives their events.
        heartbeat_sec: of the job. A process that has begun to beat, and is silent for twice as long, is killed.
    """

    def __init__(self, processes: SideProcesses, listener: SideListener, *, heartbeat_sec: float) -> None:
        self._processes = processes
        self._listener = listener
        self._silence_sec = SILENCE_PER_HEARTBEAT * heartbeat_sec
        self._standstill = Standstill()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._selector = selectors.DefaultSelector()
        self._killed: set[int] = set()
        self._closed = False

    def fileno(self) -> int:
        """Return a descriptor for a selector."""
        return self._selector.fileno()

    @property
    def is_empty(self) -> bool:
        """Return whether none runs."""
        return not self._running

    def start(self, number: int, process: SideProcess) -> None:
        """Start a process; the listener hears of it, even if it cannot be started."""
        try:
            started = self._processes.start(number, process)
        except ConfigurationError as exc:
            self._listener.side_refused(number, str(exc))
            return
        self._running[number] = started
        assert started.stdout is not None
        self._selector.register(
            started.stdout.fileno(), selectors.EVENT_READ, partial(self._read, number, started.stdout.fileno())
        )
        exit_fd = watch_exit(started)
        if exit_fd is not None:
            self._selector.register(exit_fd, selectors.EVENT_READ, partial(self._forget_exit, exit_fd))
        self._listener.side_started(number, started.pid)

    def signal(self, number: int, chosen: Iterable[int]) -> None:
        """Send signal `number` to these processes."""
        self._processes.signal(number, chosen)

    def allow_threads(self) -> None:
        """Other threads are about to be started: processes that are started later are ended by their watchdog alone."""
        self._processes.die_with_thread = False

    def read(self) -> None:
        """Read what processes have printed."""
        for key, _ in self._selector.select(0):
            key.data()

    def collect(self) -> None:
        """Look for processes that have ended, and kill those that are silent for too long."""
        now = time.monotonic()
        for number, seconds in self._processes.silences(now, self._standstill.turn(now)).items():
            if seconds > self._silence_sec and number not in self._killed:
                self._killed.add(number)
                text = f"unidist: nothing was heard of it for {seconds:.1f} seconds (stopped?): it is killed\n"
                self._listener.side_printed(number, text.encode())
                self._processes.signal(signal.SIGKILL, [number])
        for number, process in list(self._running.items()):
            if process.poll() is None:
                continue
            del self._running[number]
            code = self._processes.end(number)  # and what it has left behind, which would keep its pipe open
            self._read_to_end(number, process)
            self._listener.side_ended(number, code)

    def close(self) -> None:
        """Kill all that is left. Idempotent."""
        if self._closed:
            return
        self._closed = True
        pipes = {process.stdout.fileno() for process in self._running.values() if process.stdout is not None}
        exit_fds = [key.fd for key in self._selector.get_map().values() if key.fd not in pipes]
        self._selector.close()
        for fd in exit_fds:
            os.close(fd)
        self._running.clear()
        self._processes.close()

    def _read(self, number: int, pipe: int) -> bool:
        """Read once; False when there is nothing more at the moment."""
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            if pipe in self._selector.get_map():
                self._selector.unregister(pipe)
            return False
        self._listener.side_printed(number, data)
        return True

    def _read_to_end(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        deadline = time.monotonic() + _LAST_OUTPUT_SEC
        for _ in range(_MAX_READS):
            if pipe not in self._selector.get_map() or time.monotonic() > deadline:
                break
            if not self._read(number, pipe):
                self._selector.select(_LAST_OUTPUT_PAUSE_SEC)
        if pipe in self._selector.get_map():
            self._selector.unregister(pipe)
        process.stdout.close()

    def _forget_exit(self, exit_fd: int) -> None:
        """It has done its work when it has woken the loop."""
        self._selector.unregister(exit_fd)
        os.close(exit_fd)


__all__ = ["SideHost", "SideListener"]
