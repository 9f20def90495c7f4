"""Where a running job keeps its status: the launcher's loop writes it, the status page's threads read it."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections import deque
from contextlib import ExitStack
from typing import Any

from unidist.control.elastic.coordinator import Beat
from unidist.control.elastic.membership import Phase
from unidist.launcher import Job, StatusPage
from unidist_launch.elastic_job.event_log import EventLog
from unidist_launch.elastic_job.parts import ElasticParts
from unidist_launch.output.lines import Stream
from unidist_launch.output.writer import Output
from unidist_status.model import JobStatus, TakenOver

SIGNALS = {"kill": signal.SIGKILL, "stacks": signal.SIGUSR2}
"""What a client may ask to be done to a rank, and the signal that does it."""


class SharedStatus:
    """What the two sides share; whoever uses it holds the lock.

    Args:
        model: the status.

    Attributes:
        asked: what clients want to be done: the action, the worker's number, the client's address.
    """

    def __init__(self, model: JobStatus) -> None:
        self.lock = threading.Lock()
        self.model = model
        self.asked: deque[tuple[str, int, str]] = deque()


class StatusBoard:
    """The launcher's side of the status of one job.

    Args:
        job: the job; `job.elastic` is set.
        log: whose events make up the status; what is found out here is published there too.
        output: of the ranks; its lines are kept for the page, if there is one.
        stack: takes what has to be given back.

    Raises:
        ConfigurationError: the page cannot be served as was asked for.
    """

    def __init__(self, job: Job, log: EventLog, output: Output, stack: ExitStack) -> None:
        assert job.elastic is not None
        self._log = log
        self._shared = SharedStatus(JobStatus(list(job.command), job.num_proc, now=time.monotonic(), time=time.time()))
        log.listen(self._happened)
        if job.elastic.status is not None:
            output.listen(self._printed)
            self._serve(job.elastic.status, job.command, output, stack)

    def take_over(self, parts: ElasticParts) -> None:
        """Go on with the job of a launcher that has died; before the control server starts."""
        members = parts.coordinator.membership.workers
        processes = []
        for worker in parts.workers:
            member = members.get(worker.number)
            rank = member.rank if member is not None and member.phase is Phase.MEMBER else None
            name = parts.host_names.get(worker.seat, "?")
            processes.append(TakenOver(worker.number, worker.host, name, worker.seat, worker.pid, rank))
        with self._shared.lock:
            self._shared.model.take_over(parts.generation, processes)

    def beat(self, beat: Beat) -> None:
        """Take what a worker tells."""
        with self._shared.lock:
            found = self._shared.model.beat(beat.worker, beat.pace, now=time.monotonic())
        for event, fields in found:
            self._log.publish(event, **fields)

    def take_signals(self) -> list[tuple[int, int]]:
        """Return the workers for which somebody has pressed a button since the last call, each with its signal."""
        signals = []
        while self._shared.asked:
            with self._shared.lock:
                action, number, client = self._shared.asked.popleft()
                rank = self._shared.model.rank_of(number)
            self._log.publish("asked", action=action, worker=number, rank=rank, client=client)
            signals.append((number, int(SIGNALS[action])))
        return signals

    def summary(self) -> str:
        """Return the job in a few words, for the status line."""
        with self._shared.lock:
            return self._shared.model.summary(now=time.monotonic())

    def _happened(self, event: str, fields: dict[str, Any]) -> None:
        with self._shared.lock:
            self._shared.model.happened(event, fields, now=time.monotonic(), time=time.time())

    def _printed(self, seat: int, stream: Stream, lines: list[bytes]) -> None:
        with self._shared.lock:
            self._shared.model.printed(seat, lines)

    def _serve(self, page: StatusPage, command: tuple[str, ...], output: Output, stack: ExitStack) -> None:
        # Only where a page is wanted: a web server takes a while to import.
        from unidist_status import file as status_file
        from unidist_status.server import StatusServer
        from unidist_status.source import BoardSource

        token = secrets.token_urlsafe(24) if page.token_file is None else status_file.read_token(page.token_file)
        path = page.file or status_file.default_path()
        server = StatusServer(BoardSource(self._shared), token, address=page.address, port=page.port)
        stack.callback(server.close)
        address = status_file.StatusAddress(server.url, token, os.getpid(), command)
        status_file.write(path, address)
        stack.callback(status_file.remove, path)
        shown = address.full_url if page.token_file is None else f"{address.url}?token=... ({page.token_file})"
        output.message(f"unidist: status page: {shown}")
