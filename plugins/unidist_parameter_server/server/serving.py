"""A server: accepts workers and other servers, and answers each in a separate thread."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from unidist.control import ChannelListener, ChannelLost, Message, WireError, unexpected
from unidist.control.messages import Failed
from unidist.errors import ConfigurationError, PeerLostError, UnidistError, UsageError
from unidist_parameter_server.server.memory import available_bytes, in_units
from unidist_parameter_server.server.replication import BackupLink, follow
from unidist_parameter_server.server.segment import DeposedError, StoreSegment
from unidist_parameter_server.wire import ArrayChannel, SegmentLayout, failure, rules_of
from unidist_parameter_server.wire.messages import (
    Done,
    Fetch,
    Fill,
    FinishStep,
    Leave,
    Push,
    PusherHere,
    PushTogether,
    ReadContents,
    ReadLog,
    Replicate,
    Retire,
    ValuesFollow,
    Welcome,
)

Array = np.ndarray[Any, np.dtype[Any]]

_PROOF_SEC = 10.0
_SILENCE_SEC = 30.0
"""Longest time in which a peer takes nothing, or sends nothing of what it has announced."""

AddressOf = Callable[[int], tuple[str, int]]
"""Returns the address of another server, by its number; waits until it is known."""

Claim = Callable[[str], bool]
"""Claims a segment, by its name, for this server; returns whether it has it. From any thread."""


class ParameterServerProcess:
    """One server. A context manager; leaving it closes all connections.

    Args:
        number: of this server.
        host: address to listen at.
        port: 0: any.
        secret: the job's.
        address_of: finds the other servers.
        claim: see `Claim`.

    Raises:
        ConfigurationError: it cannot listen there.
    """

    def __init__(
        self, number: int, *, host: str, port: int = 0, secret: bytes, address_of: AddressOf, claim: Claim
    ) -> None:
        self._number = number
        self._secret = secret
        self._address_of = address_of
        self._claim = claim
        self._lock = threading.Lock()
        self._segments: dict[tuple[str, int], StoreSegment] = {}
        self._making: dict[tuple[str, int], threading.Lock] = {}
        self._is_primary: set[tuple[str, int]] = set()
        self._channels: set[ArrayChannel] = set()
        self._is_closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            sock = socket.create_server((host, port), family=family, backlog=512)
        except OSError as exc:
            raise ConfigurationError(f"server {number} cannot listen at {host}:{port}: {exc}") from exc
        self.address: tuple[str, int] = sock.getsockname()[:2]
        """Where it listens."""
        self._listener = ChannelListener(sock, self._proved, self._connected, name=f"unidist-server-{number}")

    def run(self) -> None:
        """Accept connections until `close`."""
        self._listener.run()

    def close(self) -> None:
        """Stop listening, and close all connections. From any thread; idempotent."""
        with self._lock:
            self._is_closed = True
            channels = list(self._channels)
        self._listener.close()
        for channel in channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _proved(self, sock: socket.socket) -> ArrayChannel:
        return ArrayChannel(sock, self._secret, is_server=True, timeout_sec=_PROOF_SEC)

    def _connected(self, channel: ArrayChannel) -> None:
        with self._lock:
            if self._is_closed:
                channel.close()
                return
            self._channels.add(channel)
        try:
            self._serve(channel)
        except (ChannelLost, WireError, TimeoutError, DeposedError):
            pass  # the other end is gone, or finds out that it was deposed
        finally:
            channel.close()
            with self._lock:
                self._channels.discard(channel)

    def _serve(self, channel: ArrayChannel) -> None:
        message = channel.receive(timeout_sec=_PROOF_SEC)
        if not isinstance(message, (Replicate, PusherHere)):
            raise unexpected(message)
        layout = message.layout
        try:
            if isinstance(message, Replicate):
                segment = self._made(layout, is_primary=False)
            else:
                segment = self._made(layout, is_primary=layout.segment == self._number)
                if message.takeover:
                    self._take_over(segment)
        except UnidistError as exc:
            channel.send(failure(exc), timeout_sec=_SILENCE_SEC)
            return
        channel.send(Welcome(segment.step), timeout_sec=_SILENCE_SEC)
        if isinstance(message, Replicate):
            follow(channel, segment)
        else:
            worker = message.worker
            segment.join(worker, message.finished)
            session = _Session(channel, segment, worker)
            try:
                session.run()
            finally:
                if session.has_left:
                    segment.leave(worker)
                else:
                    segment.disconnected(worker)
                self._forget_if_left(segment)

    def _made(self, layout: SegmentLayout, *, is_primary: bool) -> StoreSegment:
        """Return a segment, which is made when the first worker asks for it.

        Raises:
            ConfigurationError: there is not enough memory, or the backup cannot be reached.
            UsageError: another worker has asked for another one.
        """
        key = (layout.store, layout.segment)
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:  # one for each segment: two servers make each other's copies at the same time
            segment = self._segments.get(key)
            if segment is None:
                segment = self._new_segment(layout)
                if is_primary and layout.backup is not None:
                    segment.replica = self._link_to_backup(layout)
                with self._lock:
                    self._segments[key] = segment
                    if is_primary:
                        self._is_primary.add(key)
        if segment.layout != layout:
            raise UsageError(
                f"workers ask server {self._number} for different stores of the same name: the ranks have different "
                "models, or options"
            )
        return segment

    def _new_segment(self, layout: SegmentLayout) -> StoreSegment:
        needed, free = layout.nbytes, available_bytes()
        if needed <= free:
            with contextlib.suppress(MemoryError):
                return StoreSegment(layout)
        raise ConfigurationError(
            f"server {self._number} on host {socket.gethostname()} needs {in_units(needed)} for its part of the "
            f"parameters and the optimizer's state, and has {in_units(free)}; use more servers (servers=N), on hosts "
            "with more memory"
        )

    def _link_to_backup(self, layout: SegmentLayout) -> BackupLink:
        assert layout.backup is not None
        try:
            address = self._address_of(layout.backup)
            channel = ArrayChannel.connect(address, self._secret, timeout_sec=_PROOF_SEC)
            channel.send(Replicate(layout), timeout_sec=_PROOF_SEC)
            answer = channel.receive(timeout_sec=_SILENCE_SEC)
        except (ChannelLost, TimeoutError, PeerLostError) as exc:
            raise ConfigurationError(
                f"server {self._number} cannot reach server {layout.backup}, its replica: {exc}"
            ) from exc
        if isinstance(answer, Failed):
            raise ConfigurationError(answer.text)

        def report(reason: str) -> None:
            self._report(f"has no replica of its parameters any more: server {layout.backup} is lost ({reason})")

        return BackupLink(channel, lambda: self._claim(f"{layout.store}/{layout.segment}"), report)

    def _take_over(self, segment: StoreSegment) -> None:
        """Become the primary of a segment whose primary a worker has lost.

        Raises:
            PeerLostError: that one is alive, and goes on alone.
        """
        key = (segment.layout.store, segment.layout.segment)
        with self._lock:
            if key in self._is_primary:
                return
            if not self._claim(f"{key[0]}/{key[1]}"):
                raise PeerLostError(f"server {key[1]} is alive, and goes on without a replica")
            segment.promote()
            self._is_primary.add(key)
        self._report(f"takes over the parameters of server {key[1]}, which is lost")

    def _forget_if_left(self, segment: StoreSegment) -> None:
        if segment.is_left:
            key = (segment.layout.store, segment.layout.segment)
            with self._lock:
                if self._segments.get(key) is segment:
                    del self._segments[key], self._making[key]
                    self._is_primary.discard(key)
            if isinstance(segment.replica, BackupLink):
                segment.replica.close()

    def _report(self, text: str) -> None:
        print(f"server {self._number} {text}", file=sys.stderr, flush=True)


class _Session:
    """Answers one worker.

    Args:
        channel: to the worker.
        segment: of this server.
        worker: its number.
    """

    def __init__(self, channel: ArrayChannel, segment: StoreSegment, worker: int) -> None:
        self._channel = channel
        self._segment = segment
        self._worker = worker
        largest = max((shard.nbytes for shard in segment.layout.shards), default=0)
        self._memory = np.empty(largest, np.uint8)
        self.has_left = False

    def run(self) -> None:
        """Answer until the worker leaves.

        Raises:
            ChannelLost: its connection has ended before.
        """
        while not self.has_left:
            try:
                message = self._channel.receive(timeout_sec=_SILENCE_SEC)
            except TimeoutError:
                continue  # it computes; the kernel finds out whether its host is there
            if isinstance(message, Leave):
                self.has_left = True
                return
            try:
                self._answer(message)
            except DeposedError:
                self._segment.depose()
                raise ChannelLost("deposed") from None  # the worker turns to the server that goes on
            except UnidistError as exc:
                if isinstance(exc, (ChannelLost, WireError)):
                    raise
                self._send(failure(exc))

    def _answer(self, message: Message) -> None:
        match message:
            case Fill(indices):
                self._fill(indices)
            case Push():
                self._push(message)
            case Fetch(indices):
                self._fetch(indices)
            case ReadContents(indices):
                self._contents(indices)
            case FinishStep(finished, bound, timeout_sec):
                self._segment.finish_step(self._worker, finished, bound, timeout_sec)
                self._send(Done())
            case PushTogether():
                self._together(message)
            case ReadLog():
                shards = tuple(tuple(each.log) for each in self._segment.shards)
                self._send(Done(log=shards, clocks=tuple(self._segment.clocks)))
            case Retire():
                self._segment.leave(self._worker)
                self._send(Done())
            case _:
                raise unexpected(message)

    def _send(self, message: Message) -> None:
        self._channel.send(message, timeout_sec=_SILENCE_SEC)

    def _scratch(self, index: int) -> Array:
        each = self._segment.shards[index]
        return self._memory[: each.shard.nbytes].view(each.contents.values.dtype)

    def _wait_for_replica(self) -> None:
        if self._segment.replica is not None:
            self._segment.replica.wait()

    def _fill(self, indices: Sequence[int]) -> None:
        for index in indices:
            arrays = [np.empty_like(array) for array in self._segment.shards[index].arrays]
            for array in arrays:
                self._channel.receive_array(array, timeout_sec=_SILENCE_SEC)
            self._segment.fill(index, arrays)
        self._wait_for_replica()
        self._send(Done())

    def _push(self, message: Push) -> None:
        rules = rules_of(message.rules)
        for place, index in enumerate(message.indices):
            change = self._scratch(index)
            self._channel.receive_array(change, timeout_sec=_SILENCE_SEC)
            read_version = None if message.versions is None else message.versions[place]
            self._segment.push(
                index, self._worker, message.number, change, rules, message.present, message.factor, read_version
            )
        self._wait_for_replica()
        if message.fetches:
            self._fetch(message.indices)
        else:
            versions = tuple(self._segment.shards[index].version for index in message.indices)
            self._send(Done(versions, self._segment.step))

    def _fetch(self, indices: Sequence[int]) -> None:
        step = self._segment.step
        self._send(ValuesFollow())
        versions = []
        for index in indices:
            values = self._scratch(index)
            versions.append(self._segment.read(index, values))
            self._channel.send_arrays([values], timeout_sec=_SILENCE_SEC)
        self._send(Done(tuple(versions), step))

    def _contents(self, indices: Sequence[int]) -> None:
        self._send(ValuesFollow())
        for index in indices:
            each = self._segment.shards[index]
            with each.lock:
                copies = [array.copy() for array in each.arrays]
            self._channel.send_arrays(copies, timeout_sec=_SILENCE_SEC)
        self._send(Done())

    def _together(self, message: PushTogether) -> None:
        def receive(arrays: Sequence[Array]) -> None:
            for array in arrays:
                self._channel.receive_array(array, timeout_sec=_SILENCE_SEC)

        counts = self._segment.push_together(
            self._worker,
            message.number,
            message.label,
            message.present,
            rules_of(message.rules),
            receive,
            waits=message.waits,
            timeout_sec=message.timeout_sec,
        )
        self._send(Done(counts=counts, step=self._segment.step))
