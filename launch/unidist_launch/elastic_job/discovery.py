"""Which hosts there are just now: from a fixed list, or from a script that is asked again and again.

The script's format is Horovod's: a line `HOST:SLOTS` for each host, or `HOST`, whose slots --slots-per-host says.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist.jobs import sweep as process_sweep
from unidist.jobs.watchdog import ProcessWatchdog
from unidist.launcher import Host

POLL_SEC = 1.0
"""From the end of one run of the script to the start of the next."""

_SCRIPT_SEC = 60.0
_LINE = re.compile(r"((?:\w[\w.-]*@)?\w[\w.-]*)(?::(\d+))?")


def parse(text: str, slots_per_host: int | None) -> tuple[Host, ...]:
    """Return the hosts that a script's output names.

    Raises:
        ConfigurationError: a line cannot be read, or names no slots and there is no default.
    """
    slots: dict[str, int] = {}
    for line in text.splitlines():
        content = line.partition("#")[0].strip()
        if not content:
            continue
        entry = _LINE.fullmatch(content)
        if entry is None:
            raise ConfigurationError(f"{content!r} cannot be read; a line is HOST:SLOTS, or HOST")
        if entry[2] is None and slots_per_host is None:
            raise ConfigurationError(f"{content!r} names no slots; write {content}:SLOTS, or give --slots-per-host")
        number = int(entry[2]) if entry[2] is not None else slots_per_host or 0
        slots[entry[1]] = slots.get(entry[1], 0) + number
    return tuple(Host(name, number) for name, number in slots.items() if number > 0)


class HostSource(ABC):
    """Says which hosts an elastic job may use at the moment; asked by the launcher's loop, many times a second."""

    @abstractmethod
    def poll(self) -> tuple[Host, ...] | None:
        """Return the hosts if there is news of them, else None. Must not wait.

        Raises:
            ConfigurationError: they cannot be found; says why. The hosts stay as they are, and asking goes on.
        """

    def close(self) -> None:  # noqa: B027 - the default: there is nothing to release
        """Release what was taken. Called once, at the end of the job."""


class Discovery(HostSource):
    """Asks a script for hosts, without ever waiting for it. What the script starts ends with this process.

    Args:
        script: the command, as a shell would read it; a file of this name goes first.
        slots_per_host: of hosts that the script names without.

    Raises:
        ConfigurationError: there is no such script.
    """

    def __init__(self, script: str, slots_per_host: int | None) -> None:
        self._command = _command(script)
        self._slots_per_host = slots_per_host
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._next = 0.0
        self._deadline = 0.0
        self._mark = secrets.token_hex(8)
        self._watchdog = ProcessWatchdog(self._mark)

    @override
    def poll(self) -> tuple[Host, ...] | None:
        """Return the hosts if the script has just ended with an answer, else None. Never waits.

        Raises:
            ConfigurationError: it failed or answered what cannot be read; says what. Asking goes on.
        """
        now = time.monotonic()
        if self._process is None:
            if now >= self._next:
                self._start(now)
            return None
        if self._process.poll() is None:
            if now > self._deadline:
                self._end_script()
                self._next = now + POLL_SEC
                raise ConfigurationError(f"{self._command[0]} did not end within {_SCRIPT_SEC:g} seconds")
            return None
        returncode = self._process.returncode
        self._forget_script()
        assert self._output is not None
        self._output.seek(0)
        text = self._output.read().decode(errors="replace")
        self._output.close()
        self._next = now + POLL_SEC
        if returncode:
            raise ConfigurationError(f"{self._command[0]} ended with exit code {returncode}")
        return parse(text, self._slots_per_host)

    @override
    def close(self) -> None:
        """End the script if it runs, and what it has left. Idempotent.

        Raises:
            RuntimeError: a process hangs in the kernel.
        """
        self._end_script()
        self._watchdog.close()

    def _end_script(self) -> None:
        if self._process is not None:
            if self._watchdog.kill():
                self._process.wait()
            self._forget_script()
        if self._output is not None:
            self._output.close()

    def _forget_script(self) -> None:
        assert self._process is not None
        self._watchdog.forget(self._process)
        self._process = None

    def _start(self, now: float) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the script has ended
        self._deadline = now + _SCRIPT_SEC
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                env={**os.environ, process_sweep.JOB_ID_VARIABLE: self._mark},
                start_new_session=True,
            )
        except OSError as exc:
            self._output.close()
            self._next = now + POLL_SEC
            raise ConfigurationError(f"{self._command[0]} cannot be started: {exc}") from exc
        self._watchdog.watch(self._process)


def _command(script: str) -> Sequence[str]:
    if Path(script).is_file():
        if not os.access(script, os.X_OK):
            raise ConfigurationError(f"--host-discovery-script {script!r} is not executable: `chmod +x {script}`")
        return [str(Path(script).absolute())]
    try:
        words = shlex.split(script)
    except ValueError as exc:
        raise ConfigurationError(f"--host-discovery-script {script!r} cannot be read: {exc}") from exc
    if not words or shutil.which(words[0]) is None:
        raise ConfigurationError(
            f"--host-discovery-script {script!r}: there is no program {words[0] if words else ''!r}; name a file that "
            "is there, or a command of the PATH"
        )
    return words
