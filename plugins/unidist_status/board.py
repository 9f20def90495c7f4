"""The status of a running job: the launcher's loop writes it, the threads of the status page read it."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unidist.launcher import JobObserver, ObservedJob, ObservedWorker
from unidist_status.model import JobStatus
from unidist_status.options import StatusPage

if TYPE_CHECKING:
    from unidist_status.server import StatusServer

SIGNALS = {"kill": signal.SIGKILL, "stacks": signal.SIGUSR2}
"""What a client may ask to be done to a rank, and the signal that does it."""


class SharedStatus:
    """State shared by the launcher and the page. Hold the lock to use it.

    Args:
        model: the status.

    Attributes:
        asked: what clients want to be done: the action, the worker's number, the client's address.
    """

    def __init__(self, model: JobStatus) -> None:
        self.lock = threading.Lock()
        self.model = model
        self.asked: deque[tuple[str, int, str]] = deque()


class StatusBoard(JobObserver):
    """The launcher's side of the status of one job.

    Args:
        page: where the status is shown; None: nowhere but in the launcher's status line.
        is_elastic: ranks may come and go.
    """

    def __init__(self, page: StatusPage | None, *, is_elastic: bool) -> None:
        self._page = page
        self._is_elastic = is_elastic
        self._server: StatusServer | None = None
        self.wants_output = page is not None
        self._closing = ExitStack()

    @override
    def start(self, job: ObservedJob) -> None:
        self._job = job
        self._shared = SharedStatus(self._new_status(job))
        if self._page is not None:
            self._serve(self._page)

    @override
    def resumed(self, generation: int, workers: Sequence[ObservedWorker]) -> None:
        with self._shared.lock:
            self._shared.model.take_over(generation, workers)

    @override
    def beat(self, worker: int, report: Mapping[str, Any]) -> None:
        with self._shared.lock:
            found = self._shared.model.beat(worker, report, now=time.monotonic())
        for event, fields in found:
            self._job.publish(event, **fields)

    @override
    def progressed(self, worker: int, report: Mapping[str, Any]) -> None:
        with self._shared.lock:
            self._shared.model.progressed(worker, report, now=time.monotonic())

    @override
    def turn(self) -> None:
        """Do what was asked for on the page since the last turn."""
        if self._server is not None:
            self._server.start()
        with self._shared.lock:
            self._shared.model.turn(time.monotonic())
        while self._shared.asked:
            with self._shared.lock:
                action, number, client = self._shared.asked.popleft()
                rank = self._shared.model.rank_of(number)
            self._job.publish("asked", action=action, worker=number, rank=rank, client=client)
            self._job.signal(number, int(SIGNALS[action]))

    @override
    def summary(self) -> str:
        with self._shared.lock:
            return self._shared.model.summary(now=time.monotonic())

    @override
    def happened(self, event: str, fields: Mapping[str, Any]) -> None:
        with self._shared.lock:
            self._shared.model.happened(event, fields, now=time.monotonic(), time=time.time())

    @override
    def printed(self, seat: int, lines: Sequence[bytes]) -> None:
        with self._shared.lock:
            self._shared.model.printed(seat, lines)

    @override
    def close(self) -> None:
        self._closing.close()

    def _new_status(self, job: ObservedJob) -> JobStatus:
        now, clock = time.monotonic(), time.time()
        return JobStatus(list(job.command), job.num_proc, is_elastic=self._is_elastic, now=now, time=clock)

    def _serve(self, page: StatusPage) -> None:
        # Only where a page is wanted: a web server takes a while to import.
        from unidist_status import file as status_file
        from unidist_status.server import StatusServer
        from unidist_status.source import BoardSource

        token = secrets.token_urlsafe(24) if page.token_file is None else status_file.read_token(page.token_file)
        path = page.file or status_file.default_path()
        server = self._server = StatusServer(BoardSource(self._shared), token, address=page.address, port=page.port)
        self._closing.callback(server.close)
        address = status_file.StatusAddress(server.url, token, os.getpid(), self._job.command)
        status_file.write(path, address)
        self._closing.callback(status_file.remove, path)
        shown = address.full_url if page.token_file is None else f"{address.url}?token=... ({page.token_file})"
        self._job.message(f"unidist: status page: {shown}")
