"""Runs the commands of a build: output into a log, progress on the screen, and nothing left running."""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType

from unidist.errors import ConfigurationError

_PERCENT = re.compile(rb"\[ *(\d{1,3})%\]")
_ERROR = re.compile(r"\berrors?\b|\bfatal\b|not found|undefined reference|\bkilled\b|No space left", re.IGNORECASE)
_NO_ERROR = re.compile(
    r"\b0 errors?\b|-W(no-)?error|ignore_errors|/errors?\.|error\.(h|cc|o)\b|subprocess-exited-with-error"
)
_TAIL_BYTES = 1 << 18
_NUM_LINES = 5
_SAY_EVERY_SEC = 30.0
_LOOK_SEC = 0.25


class Steps:
    """The commands of one build, one after another.

    Args:
        log: file for all their output; replaced.
        timeout: for all of them together.
        say: writes a line for the user.
    """

    def __init__(self, log: Path, *, timeout: timedelta, say: Callable[[str], None]) -> None:
        self.log = log
        self._say = say
        self._timeout = timeout
        self._begin = time.monotonic()
        self._deadline = self._begin + timeout.total_seconds()
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")

    def run(self, title: str, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, failure: str) -> str:
        """Run a command to its end and return what it printed.

        Args:
            title: what it does, for the screen.
            command: program and arguments.
            env: its whole environment.
            cwd: its folder.
            failure: the error's first sentence, if the command fails.

        Raises:
            ConfigurationError: it failed, or time ran out; with the log's path and the last error lines.
        """
        start = self.log.stat().st_size
        with self.log.open("ab", buffering=0) as output, _ended_at_signals():
            output.write(f"\n$ {' '.join(command)}\n".encode())
            try:
                # A group of its own: all of it can be killed, and Ctrl-C comes to us alone.
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env=dict(env),
                    cwd=cwd,
                    start_new_session=True,
                )
            except OSError as exc:
                raise ConfigurationError(f"{failure} {command[0]} cannot be started: {exc.strerror}.") from exc
            try:
                self._follow(title, process, output.write)
                code = process.wait()
            finally:
                _kill_group(process)
        if code:
            raise ConfigurationError(f"{failure} {self.explanation(start)}")
        return self.log.read_bytes()[start:].decode(errors="replace")

    def explanation(self, start: int = 0) -> str:
        """Return where the log is and what its last error lines after byte `start` are."""
        lines = last_error_lines(self.log, start)
        listed = "".join(f"\n    {line}" for line in lines)
        return f"The log is {self.log}{'; its last error lines:' if lines else '.'}{listed}"

    def _follow(self, title: str, process: subprocess.Popen[bytes], write: Callable[[bytes], object]) -> None:
        assert process.stdout is not None
        with process.stdout as stream, _Display(title, self._begin, self._say) as display:
            tail = b""
            while True:
                if time.monotonic() > self._deadline:
                    raise ConfigurationError(
                        f"{title}: not through within {self._timeout.total_seconds():g} s in all (--timeout). "
                        f"{self.explanation()}"
                    )
                if select.select([stream], [], [], _LOOK_SEC)[0]:
                    data = os.read(stream.fileno(), 1 << 16)
                    if not data:
                        return
                    write(data)
                    found = _PERCENT.findall(tail + data)
                    tail = data[-8:]
                    if found:
                        display.percent = int(found[-1])
                display.update()


class _Display:
    """Elapsed time and percentage: a live line on a terminal, else a line now and then."""

    def __init__(self, title: str, begin: float, say: Callable[[str], None]) -> None:
        self.percent: int | None = None
        self._title = title
        self._begin = begin
        self._say = say
        self._said = time.monotonic()
        self._stack = contextlib.ExitStack()
        self._live: Callable[[str], object] | None = None

    def __enter__(self) -> _Display:
        if sys.stderr.isatty():
            from rich.console import Console

            status = self._stack.enter_context(Console(stderr=True).status(self._text()))
            self._live = lambda text: status.update(text)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def update(self) -> None:
        """Show where things are, if it is time to."""
        if self._live is not None:
            self._live(self._text())
        elif time.monotonic() - self._said > _SAY_EVERY_SEC:
            self._said = time.monotonic()
            self._say(self._text())

    def _text(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._begin), 60)
        percent = "" if self.percent is None else f", {self.percent} %"
        return f"{self._title}: {minutes}:{seconds:02}{percent}"


def last_error_lines(log: Path, start: int = 0) -> list[str]:
    """Return the last lines of `log` after byte `start` that tell of an error, else the last ones; [] if unreadable."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - _TAIL_BYTES))
            text = codecs.decode(file.read(), "utf-8", errors="replace")
    except OSError:
        return []
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line) and not _NO_ERROR.search(line)]
    return [line[:300] for line in (errors or lines)[-_NUM_LINES:]]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End every process of the command's group, compilers included."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def _ended_at_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise, as Ctrl-C does, so that what runs is ended too."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
