"""Starts the evaluator beside a job, shows what it prints, and publishes what it reports."""

from __future__ import annotations

import json
import math
import os
import secrets
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist.jobs.processes import LocalProcesses, describe_exit
from unidist.launcher import JobObserver, ObservedJob
from unidist.settings.environment import ROLE_VARIABLE
from unidist_evaluator.link import AFTER_VARIABLE, READER_VARIABLE, SOCKET_VARIABLE

_MAX_STARTS = 4
_LAST_EVALUATIONS_SEC = 600.0
_GRACE_SEC = 5.0
_READ_BYTES = 1 << 16


class EvaluatingObserver(JobObserver):
    """Runs one evaluator for one job, on the launcher's host.

    It is started with the ranks, and again if it fails, up to three times. When the job has ended well, the launcher
    waits until it has evaluated the last checkpoint; when the job has failed, it is ended.

    Args:
        command: program and arguments.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._name = secrets.token_hex(4)
        self._process: _Process | None = None
        self._starts = 0
        self._last_step = -1
        self._is_over = False

    @override
    def start(self, job: ObservedJob) -> None:
        self._job = job

    @override
    def turn(self) -> None:
        """Start the evaluator, and take what it has said."""
        if self._process is None:
            if self._starts < _MAX_STARTS and not self._is_over:
                self._start()
            return
        self._take(self._process)
        code = self._process.poll()
        if code is not None:
            self._ended(code)

    @override
    def happened(self, event: str, fields: Mapping[str, Any]) -> None:
        """Wait for the last evaluations at the end of the job."""
        if event == "end":
            self._is_over = True
            if fields["exit_code"] == 0:
                with _noticing_signals() as received:
                    self._finish(received)

    @override
    def close(self) -> None:
        """End the evaluator, if it still runs."""
        self._is_over = True
        if self._process is not None:
            self._process.terminate()
            self._ended(None)

    def _start(self) -> None:
        self._starts += 1
        try:
            self._process = _Process(self._command, name=self._name, after=self._last_step)
        except ConfigurationError as exc:
            self._starts = _MAX_STARTS
            self._job.message(f"unidist: the evaluator: {exc}")

    def _finish(self, received: Sequence[int]) -> None:
        deadline = time.monotonic() + _LAST_EVALUATIONS_SEC
        while self._process is not None or self._starts < _MAX_STARTS:
            if self._process is None:
                self._start()
                continue
            self._process.tell_end()
            self._process.wait_for_words()
            self._take(self._process)
            code = self._process.poll()
            if code is not None:
                self._ended(code)
                if code == 0:
                    return
            elif received:
                self._job.message(
                    f"unidist: {signal.Signals(received[0]).name} ends the evaluator; its last evaluation is that of "
                    f"checkpoint {self._last_step}"
                )
                return
            elif time.monotonic() > deadline:
                self._job.message(
                    f"unidist: the evaluator has not ended {_LAST_EVALUATIONS_SEC:g} s after the job, and is ended; "
                    f"its last evaluation is that of checkpoint {self._last_step}"
                )
                return

    def _take(self, process: _Process) -> None:
        for line in process.lines():
            self._job.message(f"[evaluator] {line}")
        for report in process.reports():
            self._last_step = max(self._last_step, report["step"])
            self._job.publish("evaluated", step=report["step"], values=report["values"])

    def _ended(self, code: int | None) -> None:
        assert self._process is not None
        self._take(self._process)
        self._process.close()
        self._process = None
        if code == 0:
            self._starts = _MAX_STARTS  # it has evaluated all that it wanted
        elif code is not None:
            again = "again" if self._starts < _MAX_STARTS else "no more"
            self._job.message(
                f"unidist: the evaluator has failed ({describe_exit(code)}) behind checkpoint {self._last_step}; it is "
                f"started {again}"
            )


class _Process:
    """The evaluator, the pipe of what it prints, and the socket of what it reports."""

    def __init__(self, command: Sequence[str], *, name: str, after: int) -> None:
        self._socket, other = socket.socketpair()
        with other:
            env = {
                ROLE_VARIABLE: "evaluator",
                "UNIDIST_STRATEGY": "",
                SOCKET_VARIABLE: str(other.fileno()),
                AFTER_VARIABLE: str(after),
                READER_VARIABLE: name,
            }
            self._processes = LocalProcesses(1, env=env)
            try:
                self._process = self._processes.start(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[other.fileno()],
                )
            except BaseException:
                self._processes.close()
                self._socket.close()
                raise
        assert self._process.stdout is not None
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._socket.setblocking(False)
        self._printed, self._told = b"", b""

    def poll(self) -> int | None:
        return self._process.poll()

    def tell_end(self) -> None:
        """Tell that the job is over."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def wait_for_words(self) -> None:
        """Wait a moment for output or a report."""
        select.select([self._output.fileno(), self._socket.fileno()], [], [], 0.1)
        if self._process.poll() is None:
            time.sleep(0.02)  # a closed socket is always readable

    def lines(self) -> list[str]:
        """Return the lines that it has printed since the last call; all of it once it has ended."""
        while data := _read(lambda: os.read(self._output.fileno(), _READ_BYTES)):
            self._printed += data
        *whole, self._printed = self._printed.split(b"\n")
        if self._printed and self._process.poll() is not None:
            whole.append(self._printed)
            self._printed = b""
        return [line.decode(errors="replace") for line in whole]

    def reports(self) -> list[dict[str, Any]]:
        """Return the reports since the last call."""
        while data := _read(lambda: self._socket.recv(_READ_BYTES)):
            self._told += data
        *whole, self._told = self._told.split(b"\n")
        return [report for line in whole if (report := _checked(line)) is not None]

    def terminate(self) -> None:
        """Ask it to end, and wait a little."""
        self.tell_end()
        self._processes.signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_SEC)

    def close(self) -> None:
        """Kill what is left, and give back all descriptors."""
        self._processes.close()
        self._output.close()
        self._socket.close()


@contextmanager
def _noticing_signals() -> Iterator[list[int]]:
    """Note SIGINT and SIGTERM in a list, in place of the launcher, whose ranks have ended."""
    received: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(read: Any) -> bytes:
    try:
        data: bytes = read()
    except OSError:  # nothing at the moment, or the other end is gone
        return b""
    return data


def _checked(line: bytes) -> dict[str, Any] | None:
    """Return a report with finite values; None if it makes no sense."""
    try:
        told = json.loads(line)
        values = {str(name): float(value) for name, value in told["values"].items()}
        return {"step": int(told["step"]), "values": {n: v for n, v in values.items() if math.isfinite(v)}}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
