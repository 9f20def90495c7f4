"""A data worker's side of the connections to ranks."""

from __future__ import annotations

import os
import pickle
import queue
import socket
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from unidist.control import Channel, ChannelListener, ChannelLost, Message
from unidist.negotiation import unseal
from unidist_data_service.transport import BatchArray, Regions, flatten, layout
from unidist_data_service.transport.messages import (
    AskSpec,
    Batch,
    DataWorkerHere,
    Define,
    EndOfPart,
    Fetch,
    LeaveEpoch,
    MakingFailed,
    RankHere,
    ReadStream,
    Request,
    SourceRequest,
    Spec,
)
from unidist_data_service.worker.sources import IndexedSource, StreamSource
from unidist_data_service.worker.streams import Dealer

PURPOSE = "a dataset for data workers"
"""What the pickle of a source is sealed for."""

R = TypeVar("R", bound=SourceRequest)

_HANDSHAKE_SEC = 20.0
_SEND_SEC = 600.0
_ROUNDS_AHEAD = 8


class _Rank:
    """A connected rank: a thread reads what it asks for, another one sends."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.regions = Regions()
        self.uses_regions = False
        self.sources: set[str] = set()
        self._outgoing: queue.SimpleQueue[tuple[Message, list[BatchArray]] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="unidist-data-send", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._sender.start()

    def answer(self, message: Message, leaves: list[BatchArray] | None = None) -> None:
        """Send a message, and arrays, when those before it are sent."""
        self._outgoing.put((message, leaves or []))

    def close(self) -> None:
        """End the connection, and the threads with it."""
        self.channel.close()
        self._outgoing.put(None)

    def _send(self) -> None:
        try:
            while (item := self._outgoing.get()) is not None:
                self._send_one(*item)
        except ChannelLost:
            self.channel.close()  # the reader notices
        finally:
            self.regions.close()

    def _send_one(self, message: Message, leaves: list[BatchArray]) -> None:
        if not isinstance(message, Batch) or not leaves:
            self.channel.send(message, timeout_sec=_SEND_SEC)
            return
        infos = [leaf.info for leaf in leaves]
        offsets, size = layout(infos)
        message = replace(message, arrays=tuple(infos))
        if not self.uses_regions or not size:
            parts: list[memoryview | bytes] = []
            for leaf, offset, end in zip(leaves, offsets, (*offsets[1:], size), strict=True):
                parts += [leaf.data, bytes(end - offset - leaf.info.nbytes)]
            self.channel.send(message, parts, timeout_sec=_SEND_SEC)
            return
        region = self.regions.take(size)
        for leaf, offset in zip(leaves, offsets, strict=True):
            region.write(offset, leaf.data)
        path = f"/proc/{os.getpid()}/fd/{region.fd}"
        self.channel.send(replace(message, region=(region.number, path, region.size)), timeout_sec=_SEND_SEC)


@dataclass
class _Source:
    """A dataset, and who reads it."""

    made: IndexedSource | StreamSource
    readers: dict[int, int]
    size: int
    tail: Any
    dealers: dict[tuple[int, int], Dealer] = field(default_factory=dict)
    finished: set[tuple[int, int]] = field(default_factory=set)
    waiting: list[tuple[_Rank, ReadStream]] = field(default_factory=list)

    def tidy(self) -> None:
        """Forget the epochs of parts that nobody reads any more."""
        for key in [key for key, dealer in self.dealers.items() if dealer.is_done]:
            del self.dealers[key]
            self.finished.add(key)


class DataWorker:
    """Makes batches for all ranks, in one thread, in the order in which they ask.

    Args:
        name: in messages.
        secret: of the job.
        host: address to listen at.
    """

    def __init__(self, name: str, secret: bytes, *, host: str = "127.0.0.1") -> None:
        self.name = name
        """In messages."""
        self._secret = secret
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, 0), family=family, backlog=512)
        self.port: int = sock.getsockname()[1]
        self._listener = ChannelListener(sock, self._proved, self._connected, name="unidist-data-read")
        self._requests: queue.SimpleQueue[tuple[_Rank, Request | None, bytes] | None] = queue.SimpleQueue()
        self._sources: dict[str, _Source | str] = {}
        self._ranks: set[_Rank] = set()
        self._accepting = threading.Thread(target=self._listener.run, name="unidist-data-accept", daemon=True)

    def start(self) -> None:
        """Begin to accept connections."""
        self._accepting.start()

    def run(self) -> None:
        """Make batches until `stop`."""
        while (request := self._requests.get()) is not None:
            self._serve(*request)

    def stop(self) -> None:
        """End `run`, soon. From any thread."""
        self._requests.put(None)

    def close(self) -> None:
        """Close all connections, and end the thread that accepts them."""
        self._listener.close()
        if self._accepting.is_alive():
            self._accepting.join()
        for rank in list(self._ranks):
            rank.close()

    # Connections

    def _proved(self, sock: socket.socket) -> Channel:
        return Channel(sock, self._secret, is_server=True, timeout_sec=_HANDSHAKE_SEC)

    def _connected(self, channel: Channel) -> None:
        rank = _Rank(channel)
        self._ranks.add(rank)
        rank.start()
        rank.answer(DataWorkerHere(self.name, os.getpid(), rank.regions.token_path, rank.regions.token))
        try:
            while True:
                message = channel.receive()
                if not isinstance(message, Request):
                    return
                rank.regions.free(message.freed)
                payload = bytearray(message.num_bytes)
                channel.receive_into(memoryview(payload))
                if isinstance(message, RankHere):
                    rank.uses_regions = message.maps
                else:
                    self._requests.put((rank, message, bytes(payload)))
        except ChannelLost:
            pass
        finally:
            rank.close()
            self._ranks.discard(rank)
            self._requests.put((rank, None, b""))

    # The thread that makes batches

    def _serve(self, rank: _Rank, message: Request | None, payload: bytes) -> None:
        """Do what a rank asks for; None: it is lost."""
        if isinstance(message, Define):
            self._define(rank, message, payload)
        elif isinstance(message, SourceRequest):
            self._guarded(rank, message, self._answer)
        else:
            for name in list(rank.sources):
                self._drop(rank, name)

    def _guarded(self, rank: _Rank, message: R, answer: Callable[[_Rank, R, _Source], object]) -> None:
        """Answer a request; what is raised by the dataset is told to the rank."""
        source = self._sources.get(message.source, "this data worker does not know the dataset any more")
        if isinstance(source, str):
            rank.answer(MakingFailed(message.ticket, "", source))
            return
        try:
            answer(rank, message, source)
        except Exception as exc:
            rank.answer(MakingFailed(message.ticket, type(exc).__name__, _trace(exc)))

    def _define(self, rank: _Rank, message: Define, payload: bytes) -> None:
        name = message.source
        rank.sources.add(name)
        if name in self._sources:
            return
        try:
            function, args, kwargs = pickle.loads(unseal(payload, PURPOSE))
            made = function(*args, **kwargs)
            self._sources[name] = _Source(made, message.readers, message.size, message.tail)
        except Exception as exc:
            self._sources[name] = _trace(exc)

    def _drop(self, rank: _Rank, name: str) -> None:
        rank.sources.discard(name)
        if not any(name in each.sources for each in self._ranks):
            self._sources.pop(name, None)

    def _answer(self, rank: _Rank, message: SourceRequest, source: _Source) -> None:
        made = source.made
        match message:
            case Fetch():
                assert isinstance(made, IndexedSource)
                self._send_batch(rank, message, made.fetch(message.indices, message.seed))
            case AskSpec():
                assert isinstance(made, StreamSource)
                rank.answer(Spec(message.ticket, made.spec(message.shard)))
            case ReadStream():
                self._next(rank, message, source)
                self._retry(source)
            case LeaveEpoch():
                for (epoch, _), dealer in source.dealers.items():
                    if epoch <= message.epoch:
                        dealer.leave(message.reader)
                self._retry(source)

    def _next(self, rank: _Rank, message: ReadStream, source: _Source) -> None:
        """Answer a request for a batch of a stream, or keep it until other ranks have taken theirs."""
        made = source.made
        assert isinstance(made, StreamSource)
        key = (message.epoch, message.shard.index)
        if key in source.finished:
            rank.answer(EndOfPart(message.ticket))
            return
        dealer = source.dealers.get(key)
        if dealer is None:
            dealer = source.dealers[key] = Dealer(
                made.epoch(message.shard),
                size=source.size,
                readers=source.readers,
                tail=source.tail,
                ahead=_ROUNDS_AHEAD,
            )
        if not dealer.may_take(message.round):
            source.waiting.append((rank, message))
            return
        found = dealer.take(message.reader, message.round)
        if found is None:
            rank.answer(EndOfPart(message.ticket))
        else:
            self._send_batch(rank, message, found[0])

    def _retry(self, source: _Source) -> None:
        source.tidy()
        waiting, source.waiting = source.waiting, []
        for rank, message in waiting:
            self._guarded(rank, message, self._next)
        source.tidy()

    def _send_batch(self, rank: _Rank, message: SourceRequest, batch: Any) -> None:
        tree, leaves = flatten(batch)
        rank.answer(Batch(message.ticket, tree), leaves)


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip()
