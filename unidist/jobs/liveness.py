"""Whether a process is still running, as seen by the one that started it on this host.

Processes beside the ranks beat for their launcher. Before the first word of any process only the kernel knows that it
was stopped: `StopWatch`.
"""

from __future__ import annotations

import os
import threading
import time

from unidist.control.standstill import Standstill
from unidist.jobs.sweep import is_stopped

__all__ = ["Beats", "StopWatch", "beat_for_launcher"]

_VARIABLE = "UNIDIST_BEATS_FD"
_BEAT_SEC = 0.5
_LOOK_SEC = 0.5


class Beats:
    """The launcher's end of a pipe on which a process it starts may beat. Without a first beat nothing is judged.

    Attributes:
        environ: variables for the process.
        process_fd: the other end, to be passed to the process; `started` closes it here.

    Raises:
        OSError: there is no descriptor left.
    """

    def __init__(self) -> None:
        self._fd, self.process_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.environ = {_VARIABLE: str(self.process_fd)}
        self._heard: float | None = None

    def started(self) -> None:
        """The process has its end."""
        os.close(self.process_fd)

    def silence(self, now: float, standstill: float) -> float:
        """Return for how many seconds nothing was heard.

        Args:
            now: seconds of `time.monotonic`.
            standstill: for how long the caller itself stood still since it asked last.
        """
        if self._has_beaten():
            self._heard = now
        if self._heard is None:
            return 0.0
        self._heard = min(now, self._heard + standstill)
        return now - self._heard

    def close(self) -> None:
        """Close this end."""
        os.close(self._fd)

    def _has_beaten(self) -> bool:
        try:
            return bool(os.read(self._fd, 4096))
        except BlockingIOError:
            return False


class StopWatch:
    """Tells for how long a process has been stopped, by SIGSTOP or from a terminal. A debugger does not count.

    Args:
        pid: a process of this host that the caller has not waited for yet.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looked: float | None = None
        self._since: float | None = None
        self._standstill = Standstill()

    def seconds(self, now: float) -> float:
        """Return for how many seconds it has been seen stopped, without a break; 0.0 while it runs.

        To be called in each turn of a loop: the time in which the caller itself stood still does not count.

        Args:
            now: seconds of `time.monotonic`.
        """
        standstill = self._standstill.turn(now)
        if self._since is not None:
            self._since = min(now, self._since + standstill)
        if self._looked is None or now - self._looked >= _LOOK_SEC:
            self._looked = now
            if not is_stopped(self._pid):
                self._since = None
            elif self._since is None:
                self._since = now
        return 0.0 if self._since is None else now - self._since


def beat_for_launcher() -> None:
    """Beat from a thread until this process ends, if a launcher has started it beside its ranks and watches it.

    A process that has begun to beat and is silent for twice the job's heartbeat, because it is stopped or holds
    Python's lock, is killed, and so treated like one that has died. Call it before anything that others wait for.
    """
    fd = os.environ.pop(_VARIABLE, "")
    if fd.isdecimal():
        os.set_inheritable(int(fd), False)
        threading.Thread(target=_beat, args=(int(fd),), name="unidist-beats", daemon=True).start()


def _beat(fd: int) -> None:
    while True:
        try:
            os.write(fd, b"\0")
        except BlockingIOError:  # who reads it is stopped itself
            pass
        except OSError:  # nobody watches any more
            return
        time.sleep(_BEAT_SEC)
