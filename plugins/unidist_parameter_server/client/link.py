"""A worker's connection to one segment of a store: requests that are repeated, on the replica if need be.

Every request may be repeated: a push has a number, and a server applies each number once; a clock is told as a number
of steps. So a request whose answer is lost with the connection is sent again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unidist.control import ChannelLost, Message, unexpected
from unidist.control.messages import Failed
from unidist.errors import PeerLostError, StalledError
from unidist_parameter_server.wire import ArrayChannel, SegmentLayout, told_error
from unidist_parameter_server.wire.messages import Done, FinishStep, Leave, PusherHere, Retire, ValuesFollow, Welcome

Array = np.ndarray[Any, np.dtype[Any]]

ServerAddresses = Sequence[tuple[str, int]]
"""Host and port of each server, by its number."""

_CONNECT_SEC = 5.0
_RECONNECT_SEC = 1.0
_RETRY_SEC = 0.05
_MAX_ATTEMPTS = 6
_ANSWER_SEC = 30.0
"""How long a server may take to answer what needs no other worker."""


class SegmentLink:
    """The connection of one worker to one segment. Use from one thread at a time; `close` from any.

    Args:
        layout: of the segment.
        worker: number of the worker.
        addresses: of all servers.
        secret: the job's.
        timeout_sec: longest wait for other workers.

    Raises:
        ConfigurationError, UsageError: the server refuses; says why.
        PeerLostError: it cannot be reached.
    """

    def __init__(
        self,
        layout: SegmentLayout,
        worker: int,
        addresses: ServerAddresses,
        secret: bytes,
        *,
        timeout_sec: float,
    ) -> None:
        self.layout = layout
        self._worker = worker
        self._addresses = addresses
        self._secret = secret
        self.timeout_sec = timeout_sec
        self._server = layout.segment
        self._finished = 0
        self._channel: ArrayChannel | None = None
        self._is_closed = False
        self.step = 0
        """Number of synchronous steps that were applied when the worker has last read."""
        self._version = 0
        self._saved_version: int | None = None
        self._connected(_CONNECT_SEC)

    def request(
        self,
        message: Message,
        arrays: Callable[[], Sequence[Array]] | None = None,
        receive: Callable[[ArrayChannel], None] | None = None,
        *,
        waits: bool = False,
    ) -> Done:
        """Send a message with arrays, and return the answer; again on another connection if this one breaks.

        Args:
            message: see `wire.messages`.
            arrays: returns what is sent behind it.
            receive: takes what the server sends before its answer, if it sends any. Called again if that is repeated.
            waits: the server waits for other workers before it answers.

        Raises:
            PeerLostError: the server is lost, and has no replica, or what it tells. StalledError: it does not answer,
            or it tells that a worker does not come.
        """
        limit = self.timeout_sec + _ANSWER_SEC if waits else max(_ANSWER_SEC, self.timeout_sec)
        reason = ""
        for _ in range(_MAX_ATTEMPTS):
            channel = self._channel or self._connected(_RECONNECT_SEC)
            try:
                channel.send_with(message, [] if arrays is None else arrays(), timeout_sec=limit)
                answer = channel.receive(timeout_sec=limit)
                if isinstance(answer, ValuesFollow):
                    assert receive is not None
                    receive(channel)
                    answer = channel.receive(timeout_sec=limit)
            except ChannelLost as exc:
                self._channel = None
                channel.close()
                if self._is_closed:
                    raise
                reason = str(exc)
                continue
            except TimeoutError:
                self._disconnect()
                raise StalledError(
                    f"worker {self._worker} has waited {limit:.0f} s for an answer of {self._name()} to "
                    f"{message.type_name!r}; it was stopped, or its host is overloaded"
                ) from None
            if isinstance(answer, Failed):
                raise told_error(answer)
            if not isinstance(answer, Done):
                raise unexpected(answer)
            self.step = max(self.step, answer.step)
            self._version = max([self._version, *answer.versions])
            return answer
        raise PeerLostError(
            f"worker {self._worker} has sent {message.type_name!r} {_MAX_ATTEMPTS} times to {self._name()}, which "
            f"takes connections and closes them ({reason}); its own output says why"
        )

    def saved(self) -> None:
        """What was pushed until now is saved elsewhere; if the server is lost, the message counts from here."""
        self._saved_version = self._version

    def finish_step(self, bound: int | None) -> None:
        """See `Store.finish_step`."""
        self._finished += 1
        self.request(FinishStep(self._finished, bound, self.timeout_sec), waits=True)

    def retire(self) -> None:
        """Tell the server that nobody has to wait for this worker any more."""
        with contextlib.suppress(PeerLostError):
            self.request(Retire())

    def leave(self) -> None:
        """Tell the server that this worker has ended, and close the connection. Idempotent."""
        self._is_closed = True
        if self._channel is not None:
            with contextlib.suppress(ChannelLost):
                self._channel.send(Leave(), timeout_sec=_RECONNECT_SEC)
            self._disconnect()

    def _disconnect(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _connected(self, patience_sec: float) -> ArrayChannel:
        """Return a new connection: to the server, or to its replica, which then takes the segment over."""
        deadline = time.monotonic() + patience_sec
        while True:
            try:
                return self._connect(self._server, takeover=self._server != self.layout.segment)
            except ChannelLost as exc:
                reason = str(exc)
            except TimeoutError:
                reason = "it does not answer"
            if self._server == self.layout.segment and self.layout.backup is not None:
                self._server = self.layout.backup
                deadline = time.monotonic() + _CONNECT_SEC
                continue
            if time.monotonic() >= deadline:
                raise PeerLostError(
                    f"worker {self._worker} has lost {self._name()} ({reason}), and with it the parameters there: "
                    f"{self._loss()}. Start the job again; with replicas=1 another server goes on"
                )
            time.sleep(_RETRY_SEC)

    def _connect(self, server: int, *, takeover: bool) -> ArrayChannel:
        channel = ArrayChannel.connect(self._addresses[server], self._secret, timeout_sec=_CONNECT_SEC)
        try:
            channel.send(PusherHere(self._worker, self._finished, takeover, self.layout), timeout_sec=_CONNECT_SEC)
            answer = channel.receive(timeout_sec=_ANSWER_SEC)
            if isinstance(answer, Failed):
                raise told_error(answer)
            if not isinstance(answer, Welcome):
                raise unexpected(answer)
        except BaseException:
            channel.close()
            raise
        self._channel = channel
        self.step = max(self.step, answer.step)
        return channel

    def _loss(self) -> str:
        if self._saved_version is None:
            return f"{self._version} updates, since there is no checkpoint"
        return f"{self._version - self._saved_version} updates since the last checkpoint"

    def _name(self) -> str:
        host, port = self._addresses[self._server]
        return f"server {self._server} at {host}:{port}"
