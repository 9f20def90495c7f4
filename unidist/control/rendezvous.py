"""Rendezvous of the ranks of several hosts, over the job's control server."""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta

from typing_extensions import override

from unidist.control.client import ControlClient
from unidist.control.codec import Message, WireError
from unidist.control.connection import ConnectionLost
from unidist.control.meeting import MAX_PAYLOAD_BYTES
from unidist.control.messages import Failed, Gathered, Give, GiveUp, LeaveMeeting, RankHere
from unidist.errors import ConfigurationError, PeerLostError, StalledError, UsageError
from unidist.rendezvous import Contribution, MeetingPlace, Rendezvous
from unidist.topology import Topology

_LEAVE_SEC = 1.0
_ANSWER_SEC = 5.0
_ERRORS: dict[str, type[PeerLostError]] = {"StalledError": StalledError, "PeerLostError": PeerLostError}


class ControlRendezvous(Rendezvous):
    """Connects the ranks of a job; each has a connection to the control server, and none to the others.

    Args:
        place: where they meet.
        topology: this process's place.
        epoch: number of this `init()` in the process; equal on all ranks.
        secret: the job's secret.
        timeout: longest wait for all ranks to come.

    Raises:
        StalledError: ranks are missing after `timeout`, or the server does not answer; names them.
        PeerLostError: a rank came and died, this process's generation has ended, or the launcher is gone.
        ConfigurationError: this process has no place in the job.
    """

    def __init__(
        self, place: MeetingPlace, topology: Topology, *, epoch: int, secret: bytes, timeout: timedelta
    ) -> None:
        self.address = place.host_address
        self._rank = topology.rank
        self._generation = place.generation
        self._round = 0
        self._where = f"the job's control server at {place.server[0]}:{place.server[1]}"
        try:
            self._client = ControlClient(place.server, secret, timeout=timeout.total_seconds())
        except TimeoutError:
            raise StalledError(f"init: rank {self._rank} got no answer of {self._where}") from None
        except (ConnectionLost, WireError) as exc:
            raise PeerLostError(
                f"init: rank {self._rank} cannot use {self._where}: {exc}. Has the launcher ended?"
            ) from exc
        try:
            self._send(
                RankHere(self._generation, epoch, topology.rank, topology.node_rank, topology.world_size),
                time.monotonic() + timeout.total_seconds(),
            )
            self.allgather(b"", timeout=timeout)  # the first answer: all have come, or this rank has no place
        except BaseException:
            self._client.close()
            raise

    @override
    def allgather(self, payload: bytes, *, fds: Sequence[int] = (), timeout: timedelta) -> list[Contribution]:
        """Exchange payloads with the other ranks; descriptors cannot be sent to other hosts."""
        if fds:
            raise UsageError("open descriptors cannot be given to other hosts")
        if len(payload) >= MAX_PAYLOAD_BYTES:
            raise ValueError(f"a contribution is at most {MAX_PAYLOAD_BYTES} bytes")
        deadline = time.monotonic() + timeout.total_seconds()
        number, self._round = self._round, self._round + 1
        self._send(Give(self._generation, number, base64.b64encode(payload).decode()), deadline)
        contributions: list[Contribution] = []
        for item, count in self._gathered(number, deadline).runs:
            contributions += [Contribution(base64.b64decode(item))] * count
        return contributions

    def close(self) -> None:
        """Say goodbye and close the connection."""
        with contextlib.suppress(PeerLostError):  # there may be nobody left to tell
            self._send(LeaveMeeting(self._generation), time.monotonic() + _LEAVE_SEC)
        self._client.close()

    def _gathered(self, number: int, deadline: float) -> Gathered:
        try:
            return self._next(deadline)
        except TimeoutError:
            # Ask who is missing. The answer comes as an error, or is what we waited for after all.
            late = time.monotonic() + _ANSWER_SEC
            self._send(GiveUp(self._generation, number), late)
        try:
            return self._next(late)
        except TimeoutError:
            raise StalledError(f"init: rank {self._rank} got no answer of {self._where}") from None

    def _send(self, message: Message, deadline: float) -> None:
        try:
            self._client.send(message, timeout=max(0.001, deadline - time.monotonic()))
        except (ConnectionLost, OSError) as exc:
            raise PeerLostError(f"rank {self._rank} lost {self._where}: {exc}") from exc

    def _next(self, deadline: float) -> Gathered:
        try:
            message = self._client.receive(timeout=max(0.0, deadline - time.monotonic()))
        except (ConnectionLost, WireError) as exc:
            raise PeerLostError(f"rank {self._rank} lost {self._where}: {exc}") from exc
        if isinstance(message, Failed):
            raise _told_error(message)
        if not isinstance(message, Gathered):
            raise PeerLostError(f"rank {self._rank}: {self._where} answered with {message.type_name!r}")
        return message


def _told_error(message: Failed) -> Exception:
    if message.kind in _ERRORS:
        return _ERRORS[message.kind](message.text, ranks=message.ranks)
    return ConfigurationError(message.text)
