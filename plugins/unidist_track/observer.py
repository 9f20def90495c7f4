"""Follows a job in its launcher, and hands its figures to the processes of trackers."""

from __future__ import annotations

import json
import math
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from typing_extensions import override

from unidist.launcher import JobObserver, ObservedJob, ObservedWorker
from unidist_status import JobStatus, title_of
from unidist_track.tracker import TrackerSpec

_INTERVAL_SEC = 1.0
_LAST_WORDS_SEC = 30.0
_WAITING_POINTS = 10_000


class TrackingObserver(JobObserver):
    """Records one job with one or more trackers.

    Args:
        trackers: which, with the target of each.
        is_elastic: ranks may come and go.
    """

    def __init__(self, trackers: Sequence[tuple[TrackerSpec, str]], *, is_elastic: bool) -> None:
        self._trackers = trackers
        self._is_elastic = is_elastic
        self._records: list[_Record] = []
        self._last_step: int | None = None
        self._due = -math.inf

    @override
    def start(self, job: ObservedJob) -> None:
        self._job = job
        now, clock = time.monotonic(), time.time()
        self._status = JobStatus(list(job.command), job.num_proc, is_elastic=self._is_elastic, now=now, time=clock)

    @override
    def resumed(self, generation: int, workers: Sequence[ObservedWorker]) -> None:
        self._status.take_over(generation, workers)

    @override
    def happened(self, event: str, fields: Mapping[str, Any]) -> None:
        """Follow the job; a rank's last words are recorded before it is forgotten."""
        if event == "exit" and self._records:
            self._add_point(time.monotonic())
        self._status.happened(event, fields, now=time.monotonic(), time=time.time())
        if event == "evaluated":
            values = {f"eval/{name}": value for name, value in fields["values"].items()}
            for record in self._records:
                record.put({"step": fields["step"], "time": time.time(), "values": values})

    @override
    def beat(self, worker: int, report: Mapping[str, Any]) -> None:
        self._status.beat(worker, report, now=time.monotonic())  # its events are the status page's to publish

    @override
    def progressed(self, worker: int, report: Mapping[str, Any]) -> None:
        self._status.progressed(worker, report, now=time.monotonic())

    @override
    def turn(self) -> None:
        """Start the trackers; then record a point a second while the job makes steps."""
        if not self._records:
            first = {
                "title": title_of(self._job.command),
                "command": list(self._job.command),
                "num_proc": self._job.num_proc,
            }
            self._records = [_Record(spec, {**first, "target": target}) for spec, target in self._trackers]
        for record in self._records:
            self._say(record.failure())
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _INTERVAL_SEC
            self._add_point(now)

    @override
    def close(self) -> None:
        """Record the last point, and wait for the trackers to write it."""
        if not self._records:
            return
        self._add_point(time.monotonic())
        deadline = time.monotonic() + _LAST_WORDS_SEC
        for record in self._records:
            record.finish(self._status.exit_code)
        for record in self._records:
            self._say(record.wait(deadline))

    def _say(self, text: str) -> None:
        if text:
            self._job.message(f"unidist: {text}")

    def _add_point(self, now: float) -> None:
        step, figures = self._status.figures(now=now)
        if step is None or step == self._last_step:
            return
        self._last_step = step
        point = {"step": step, "time": time.time(), "values": figures}
        for record in self._records:
            record.put(point)


class _Record:
    """A tracker's process, and the thread that writes to it: the launcher never waits for either."""

    def __init__(self, spec: TrackerSpec, first: Mapping[str, Any]) -> None:
        self._name = spec.name
        self._is_reported = False
        self._lines: queue.Queue[str | None] = queue.Queue(_WAITING_POINTS)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long-lived as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "unidist_track.writer", spec.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._write, name=f"unidist-track-{spec.name}", daemon=True)
        self._thread.start()
        self.put(first)

    def put(self, line: Mapping[str, Any]) -> None:
        """Write a line, sometime; it is left out if the tracker is hours behind."""
        with suppress(queue.Full):
            self._lines.put_nowait(json.dumps(line))

    def finish(self, exit_code: int | None) -> None:
        """Write the last line."""
        self.put({"exit_code": exit_code})
        with suppress(queue.Full):
            self._lines.put_nowait(None)

    def wait(self, deadline: float) -> str:
        """Wait until all is recorded, and end a tracker that takes too long; returns what went wrong, or ""."""
        try:
            self._process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return f"--track {self._name}: did not finish within {_LAST_WORDS_SEC:g} s, and was ended"
        return self.failure()

    def failure(self) -> str:
        """Return why the tracker's process has failed, the first time that it is asked after that; else ""."""
        if self._is_reported or not self._process.poll():
            return ""
        self._is_reported = True
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        return f"--track {self._name}: recording has ended: {text or f'exit code {self._process.returncode}'}"

    def _write(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as stream:  # a broken pipe: `failure` says why
            while (line := self._lines.get()) is not None:
                stream.write(line + "\n")
                stream.flush()
