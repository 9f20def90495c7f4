"""One call on all ranks of a pool: from the messages sent to the answers."""

from __future__ import annotations

import selectors
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from unidist.jobs.pool._channel import WorkerChannel
from unidist.jobs.pool._output import RankPipe
from unidist.jobs.pool.answers import Answers
from unidist.jobs.processes import describe_exit

_ERROR_GRACE_SEC = 2.0
_DEATH_GRACE_SEC = 0.2
_EXIT_GRACE_SEC = 1.0
_EXIT_CHECK_SEC = 0.1


@dataclass(frozen=True)
class PoolWorker:
    """One rank of a pool: its process, our end of its socket, and a descriptor that tells its end (or None).

    `pipes` bring what it prints, if this process shows it.
    """

    rank: int
    process: subprocess.Popen[bytes]
    channel: WorkerChannel
    exit_fd: int | None
    pipes: tuple[RankPipe, ...] = ()


class PoolCall:
    """Sends one message to each worker and collects the answers.

    Args:
        workers: in rank order.
        name: what is called, for messages.
    """

    def __init__(self, workers: Sequence[PoolWorker], name: str) -> None:
        self._workers = {worker.rank: worker for worker in workers}
        self.answers = Answers([*self._workers], name)
        """What has come so far."""

    def run(self, messages: Sequence[bytes], timeout_sec: float | None) -> None:
        """Send and collect until all have answered or the time is up.

        The time is that of the call or, once a rank has failed, a short grace period in which the others can still
        report what they know.
        """
        answers = self.answers
        limit = float("inf") if timeout_sec is None else time.monotonic() + timeout_sec
        with selectors.PollSelector() as selector:
            for worker, message in zip(self._workers.values(), messages, strict=True):
                worker.channel.post(message)
                selector.register(worker.channel.fd, selectors.EVENT_READ)
                if worker.exit_fd is not None:
                    selector.register(worker.exit_fd, selectors.EVENT_READ)
                for pipe in worker.pipes:
                    if not pipe.has_ended:
                        selector.register(pipe.file, selectors.EVENT_READ)
            while answers.pending and (now := time.monotonic()) < limit:
                self._select_writers(selector)
                selector.select(min(limit - now, _EXIT_CHECK_SEC))
                self._show(selector)
                for rank in sorted(answers.pending):
                    if self._serve(rank):
                        for fd in (self._workers[rank].channel.fd, self._workers[rank].exit_fd):
                            if fd is not None:
                                selector.unregister(fd)
                if answers.has_failed:
                    grace_sec = _DEATH_GRACE_SEC if answers.has_lost else _ERROR_GRACE_SEC
                    limit = min(limit, time.monotonic() + grace_sec)
        for worker in self._workers.values():
            for pipe in worker.pipes:
                while pipe.show():  # what was printed before the answers
                    pass

    def _show(self, selector: selectors.BaseSelector) -> None:
        open_pipes = [pipe for worker in self._workers.values() for pipe in worker.pipes if not pipe.has_ended]
        for pipe in open_pipes:
            pipe.show()
        for pipe in open_pipes:
            if pipe.has_ended:
                selector.unregister(pipe.file)

    def _select_writers(self, selector: selectors.BaseSelector) -> None:
        for rank in self.answers.pending:
            channel = self._workers[rank].channel
            channel.write()
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.has_to_write else 0)
            if selector.get_key(channel.fd).events != wanted:
                selector.modify(channel.fd, wanted)

    def _serve(self, rank: int) -> bool:
        """Take what a rank has to say; True when nothing more will come from it."""
        worker = self._workers[rank]
        ended = worker.process.poll() is not None  # looked at first: what it said before is in the socket then
        message = worker.channel.read()
        if message is not None:
            self.answers.take(rank, message)
            return True
        if not ended and not worker.channel.closed_by_peer:
            return False
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(_EXIT_GRACE_SEC)
        code = worker.process.returncode
        what = "closed its connection" if code is None else f"died ({describe_exit(code)})"
        self.answers.lost(rank, f"(pid {worker.process.pid}) {what}")
        return True
