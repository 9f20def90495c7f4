"""Starts the evaluator beside a job, and publishes what it reports."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist.jobs import describe_exit
from unidist.launcher import JobObserver, ObservedJob, SharedValues, SideProcess
from unidist_evaluator.link import AFTER_VARIABLE, READER_VARIABLE, end_key, report_key

_MAX_STARTS = 4
_LAST_EVALUATIONS_SEC = 600.0
_LOOK_SEC = 0.1
_REPORTS_AT_ONCE = 16


class EvaluatingObserver(JobObserver):
    """Runs one evaluator for one job.

    It is started with the ranks, and again if it fails or its host is lost, up to three times. When the job has ended
    well, the launcher waits until it has evaluated the last checkpoint; when the job has failed, it is ended.

    Args:
        command: program and arguments.
        host: index of the job's host that it runs on.
    """

    starts_processes = True

    def __init__(self, command: Sequence[str], *, host: int = 0) -> None:
        self._command = tuple(command)
        self._host = host
        self._name = secrets.token_hex(4)
        self._values: SharedValues | None = None
        self._process: int | None = None
        self._starts = 0
        self._num_reports = 0
        self._look_at = 0.0
        self._last_step = -1
        self._finish_by: float | None = None
        self._was_given_up = False

    @override
    def start(self, job: ObservedJob) -> None:
        if 0 < job.num_hosts <= self._host:
            raise ConfigurationError(
                f"--evaluator-host {self._host}: the job has {job.num_hosts} host{'s' * (job.num_hosts > 1)}, counted "
                f"from 0; give 0 to {job.num_hosts - 1}"
            )
        self._job = job

    @override
    def turn(self) -> None:
        """Start the evaluator, and take what it has said."""
        if self._values is None:
            self._values = self._job.values()
        if self._process is None and self._starts < _MAX_STARTS:
            self._start()
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_SEC
            self._take_reports()

    @override
    def process_exited(self, number: int, returncode: int) -> None:
        """Start it again in the next turn, if it has failed."""
        if number != self._process:
            return
        self._take_reports()
        self._process = None
        if returncode == 0:
            self._starts = _MAX_STARTS  # it has evaluated all that it wanted
        elif not self._was_given_up:
            again = "again" if self._starts < _MAX_STARTS else "no more"
            self._job.message(
                f"unidist: the evaluator has failed ({describe_exit(returncode)}) behind checkpoint "
                f"{self._last_step}; it is started {again}"
            )

    @override
    def happened(self, event: str, fields: Mapping[str, Any]) -> None:
        """Let the evaluator come to its end with the job."""
        if event == "end":
            if fields["exit_code"] == 0 and self._values is not None:
                self._finish_by = time.monotonic() + _LAST_EVALUATIONS_SEC
                self._values.set(end_key(self._name), b"")
            else:
                self._give_up("")
        elif event == "interrupted" and self._process is not None:
            self._give_up(f"{fields['signal']} ends the evaluator")

    @override
    def finishing(self) -> bool:
        """Return whether there may be checkpoints that it has not evaluated."""
        if self._was_given_up or self._finish_by is None:
            return False
        if self._process is not None and time.monotonic() > self._finish_by:
            self._give_up(f"the evaluator has not ended {_LAST_EVALUATIONS_SEC:g} s after the job, and is ended")
            return False
        return self._process is not None or self._starts < _MAX_STARTS

    def _give_up(self, why: str) -> None:
        self._was_given_up = True
        self._starts = _MAX_STARTS
        if why:
            self._job.message(f"unidist: {why}; its last evaluation is that of checkpoint {self._last_step}")

    def _start(self) -> None:
        self._starts += 1
        env = {AFTER_VARIABLE: str(self._last_step), READER_VARIABLE: self._name}
        wanted = SideProcess(self._command, "evaluator", env=env, host=self._host, label="evaluator")
        self._process = self._job.start_process(wanted)

    def _take_reports(self) -> None:
        """Publish the reports that have come."""
        while self._values is not None:
            keys = [report_key(self._name, self._num_reports + i) for i in range(_REPORTS_AT_ONCE)]
            found = [report for report in self._values.get(keys) if report is not None]
            self._num_reports += len(found)
            for report in filter(None, map(_checked, found)):
                self._last_step = max(self._last_step, report["step"])
                self._job.publish("evaluated", step=report["step"], values=report["values"])
            if len(found) < len(keys):
                return


def _checked(text: bytes) -> dict[str, Any] | None:
    """Return a report with finite values; None if it makes no sense."""
    try:
        told = json.loads(text)
        values = {str(name): float(value) for name, value in told["values"].items()}
        return {"step": int(told["step"]), "values": {n: v for n, v in values.items() if math.isfinite(v)}}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
