"""The answers of the ranks to one call: results in rank order, or an error that says which rank failed and why."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from unidist.errors import PeerLostError, RemoteError, StalledError

Record = tuple[int, bytes | None, str]
"""A rank, its answer, and, if it has none because it was lost, what happened. Plain data."""


@dataclass(frozen=True)
class _Failure:
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


class Answers:
    """Collects what ranks answer to one call, each by a message of `answer`.

    Args:
        ranks: that are called, in the order of the results.
        name: what is called, for messages; see `call_name`.
    """

    def __init__(self, ranks: Sequence[int], name: str) -> None:
        self.name = name
        self.pending = set(ranks)
        """Ranks that have not answered."""
        self._ranks = tuple(ranks)
        self._results: dict[int, Any] = {}
        self._failures: list[_Failure] = []
        self.records: list[Record] = []
        """All that was taken, for `add` elsewhere."""

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed: there will be no results."""
        return bool(self._failures)

    @property
    def has_lost(self) -> bool:
        """Whether a rank has died."""
        return any(failure.died for failure in self._failures)

    @property
    def lost_ranks(self) -> list[int]:
        """Ranks that died or have not answered."""
        return sorted(self.pending | {failure.rank for failure in self._failures if failure.died})

    def take(self, rank: int, message: bytes) -> None:
        """Take the answer of a rank."""
        self.records.append((rank, message, ""))
        self.pending.discard(rank)
        try:
            kind, *content = pickle.loads(message)
        except Exception as exc:  # whatever the __setstate__ of the user's objects raises
            what = f"returned from {self.name} what cannot be unpickled here: {type(exc).__name__}: {exc}"
            self._failures.append(_Failure(rank, what, cause=exc))
            return
        if kind == "value":
            self._results[rank] = content[0]
            return
        text, remote_traceback, pickled = content
        cause = None
        if pickled is not None:
            with suppress(Exception):  # an exception need not survive pickling; its text is in the traceback
                cause = pickle.loads(pickled)
        self._failures.append(_Failure(rank, f"raised {text}", remote_traceback, cause))

    def lost(self, rank: int, what: str) -> None:
        """Take note that a rank will not answer; `what` follows "rank N": "died (exit code 7)"."""
        self.records.append((rank, None, what))
        self.pending.discard(rank)
        self._failures.append(_Failure(rank, f"{what} during {self.name}", died=True))

    def add(self, records: Iterable[Record]) -> None:
        """Take what was taken elsewhere, of ranks that have not answered here."""
        for rank, message, what in records:
            if rank not in self.pending:
                continue
            if message is None:
                self.lost(rank, what)
            else:
                self.take(rank, message)

    def results(self, *, timeout_sec: float | None = None) -> list[Any]:
        """Return the results in rank order.

        Args:
            timeout_sec: how long it was waited for ranks that have not answered, for the message.

        Raises:
            RemoteError: a rank raised or died; `__cause__` is the exception where it could be brought here.
            StalledError: ranks have not answered.
        """
        if self._failures:
            raise self._remote_error() from self._culprit().cause
        if self.pending:
            ranks = sorted(self.pending)
            raise StalledError(
                f"{_listed(ranks)} of {len(self._ranks)} did not answer {self.name} within {timeout_sec:g} s; "
                "the pool is ended. Give a longer timeout, or find out what they wait for.",
                ranks=ranks,
            )
        return [self._results[rank] for rank in self._ranks]

    def _culprit(self) -> _Failure:
        # The first that failed by itself: the others lost a peer because of it.
        return min(self._failures, key=lambda failure: isinstance(failure.cause, PeerLostError))

    def _remote_error(self) -> RemoteError:
        culprit = self._culprit()
        text = [f"rank {culprit.rank} {culprit.what}"]
        text += [f"rank {failure.rank} {failure.what}" for failure in self._failures if failure is not culprit]
        if self.pending:
            text.append(f"{_listed(self.pending)} did not answer and had to be ended")
        if culprit.remote_traceback:
            text.append(f"on rank {culprit.rank}:\n{culprit.remote_traceback}")
        return RemoteError("\n".join(text), rank=culprit.rank, remote_traceback=culprit.remote_traceback)


def call_name(function: Callable[..., Any]) -> str:
    """Return a function's name for messages."""
    return f"{getattr(function, '__qualname__', None) or type(function).__qualname__}()"


def _listed(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"
