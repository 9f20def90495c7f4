"""One call on all ranks of a pool: from the messages sent to the results, or to the error that tells why not."""

from __future__ import annotations

import pickle
import selectors
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from unidist.errors import PeerLostError, RemoteError, StalledError
from unidist.jobs.pool._channel import Channel
from unidist.jobs.processes import describe_exit

_ERROR_GRACE_SEC = 2.0
_DEATH_GRACE_SEC = 0.2
_EXIT_GRACE_SEC = 1.0
_EXIT_CHECK_SEC = 0.1


@dataclass(frozen=True)
class Worker:
    """One rank of a pool: its process, our end of its socket, and a descriptor that tells its end (or None)."""

    process: subprocess.Popen[bytes]
    channel: Channel
    exit_fd: int | None


@dataclass(frozen=True)
class Failure:
    """Why a rank has no result.

    Args:
        rank: the rank.
        what: what it did, in words that follow "rank N".
        remote_traceback: the traceback there; "" if it died.
        cause: the exception itself, where it could be brought here.
        died: the process is gone.
    """

    rank: int
    what: str
    remote_traceback: str = ""
    cause: BaseException | None = None
    died: bool = False


class Call:
    """Sends one message to each worker and collects the answers.

    Args:
        workers: by rank.
        name: what is called, for messages.
    """

    def __init__(self, workers: Sequence[Worker], name: str) -> None:
        self._workers = workers
        self._name = name
        self._results: dict[int, Any] = {}
        self._failures: list[Failure] = []
        self._timeout_sec: float | None = None
        self.pending = set(range(len(workers)))
        """Ranks that have not answered."""

    @property
    def lost_ranks(self) -> list[int]:
        """Ranks that died or did not answer; if there are any, the pool cannot be used any more."""
        return sorted(self.pending | {failure.rank for failure in self._failures if failure.died})

    def run(self, messages: Sequence[bytes], timeout_sec: float | None) -> None:
        """Send and collect until all have answered or the time is up.

        The time is that of the call or, once a rank has failed, a short grace period in which the others can still
        report what they know.
        """
        self._timeout_sec = timeout_sec
        limit = float("inf") if timeout_sec is None else time.monotonic() + timeout_sec
        with selectors.PollSelector() as selector:
            for worker, message in zip(self._workers, messages, strict=True):
                worker.channel.post(message)
                selector.register(worker.channel.fd, selectors.EVENT_READ)
                if worker.exit_fd is not None:
                    selector.register(worker.exit_fd, selectors.EVENT_READ)
            while self.pending and (now := time.monotonic()) < limit:
                self._select_writers(selector)
                selector.select(min(limit - now, _EXIT_CHECK_SEC))
                for rank in sorted(self.pending):
                    if self._serve(rank):
                        self.pending.discard(rank)
                        for fd in (self._workers[rank].channel.fd, self._workers[rank].exit_fd):
                            if fd is not None:
                                selector.unregister(fd)
                if self._failures:
                    died = any(failure.died for failure in self._failures)
                    limit = min(limit, time.monotonic() + (_DEATH_GRACE_SEC if died else _ERROR_GRACE_SEC))

    def results(self) -> list[Any]:
        """Return the results in rank order, or raise what went wrong (see `RankPool.run`)."""
        if self._failures:
            raise self._remote_error() from self._culprit().cause
        if self.pending:
            ranks = sorted(self.pending)
            raise StalledError(
                f"{_ranks(ranks)} of {len(self._workers)} did not answer {self._name} within {self._timeout_sec:g} s; "
                "the pool is ended. Give a longer timeout, or find out what they wait for.",
                ranks=ranks,
            )
        return [self._results[rank] for rank in range(len(self._workers))]

    def _select_writers(self, selector: selectors.BaseSelector) -> None:
        for rank in self.pending:
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
            self._take(rank, message)
            return True
        if not ended and not worker.channel.closed_by_peer:
            return False
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(_EXIT_GRACE_SEC)
        code = worker.process.returncode
        what = "closed its connection" if code is None else f"died ({describe_exit(code)})"
        self._failures.append(Failure(rank, f"(pid {worker.process.pid}) {what} during {self._name}", died=True))
        return True

    def _take(self, rank: int, message: bytes) -> None:
        try:
            kind, *content = pickle.loads(message)
        except Exception as exc:  # whatever the __setstate__ of the user's objects raises
            what = f"returned from {self._name} what cannot be unpickled here: {type(exc).__name__}: {exc}"
            self._failures.append(Failure(rank, what, cause=exc))
            return
        if kind == "value":
            self._results[rank] = content[0]
            return
        text, remote_traceback, pickled = content
        cause = None
        if pickled is not None:
            with suppress(Exception):  # an exception need not survive pickling; its text is in the traceback
                cause = pickle.loads(pickled)
        self._failures.append(Failure(rank, f"raised {text}", remote_traceback, cause))

    def _culprit(self) -> Failure:
        # The first that failed by itself: the others lost a peer because of it.
        return min(self._failures, key=lambda failure: isinstance(failure.cause, PeerLostError))

    def _remote_error(self) -> RemoteError:
        culprit = self._culprit()
        text = [f"rank {culprit.rank} {culprit.what}"]
        text += [f"rank {failure.rank} {failure.what}" for failure in self._failures if failure is not culprit]
        if self.pending:
            text.append(f"{_ranks(self.pending)} did not answer and had to be ended")
        if culprit.remote_traceback:
            text.append(f"on rank {culprit.rank}:\n{culprit.remote_traceback}")
        return RemoteError("\n".join(text), rank=culprit.rank, remote_traceback=culprit.remote_traceback)


def call_name(function: Callable[..., Any]) -> str:
    """Return a function's name for messages."""
    return f"{getattr(function, '__qualname__', None) or type(function).__qualname__}()"


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"
