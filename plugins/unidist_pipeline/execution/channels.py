"""The messages of one rank of a pipeline: receives are posted early, sends are waited for at the end.

The first message of a kind is preceded by its description (`messages.Form`), in host memory. Until that has arrived,
nothing after it can be received from the same rank either, because messages arrive in order; later messages are queued,
and posted as soon as their form is known. A rank waits here only for what it needs to compute, so an engine whose sends
wait for the receiver cannot deadlock.

Where an engine wants messages in matching order (`routes`), each is posted where the schedule lists it. So a receive
waits for an unknown form there.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import Communicator, Work
from unidist.errors import PeerLostError, UsageError
from unidist.framework import Framework
from unidist.negotiation.objects import gather_objects
from unidist_pipeline.execution.messages import Form, KnownForms, Message, TensorForm, pack, unpack
from unidist_pipeline.execution.routes import Routes
from unidist_pipeline.schedules.facts import Fact

_DIGEST_BYTES = 16


class DifferentInputsError(UsageError):
    """The ranks of a pipeline were called with different inputs, or for different things; raised on all of them."""


@dataclass
class _Incoming:
    """An expected message: `works` is None until its form is known and it is being received."""

    fact: Fact
    form: Form | None = None
    buffers: Sequence[Buffer] = ()
    works: Sequence[Work] | None = None


class Channels:
    """Sends and receives along a pipeline.

    Args:
        routes: of the messages, by kind of memory; used by nobody else. "host" is required.
        framework: of the tensors.
        memory: of this rank's tensors of other kinds than "host" ("cuda:1").
    """

    def __init__(self, routes: Mapping[str, Routes], framework: Framework, *, memory: str = HOST) -> None:
        self._routes = routes
        self._matched = any(each.matched for each in routes.values())
        self._host = routes[HOST].communicator
        self._framework = framework
        self._memory = memory
        self._agreement = KnownForms()
        self._keys: Sequence[Hashable] = ()
        self._queues: dict[int, deque[_Incoming]] = {}
        self._source: dict[Fact, int] = {}
        self._arrived: dict[Fact, _Incoming] = {}
        self._sending: deque[tuple[Work, Buffer, int, str]] = deque()

    def begin_run(self, description: str, keys: Sequence[Hashable], *, renews: bool = False) -> None:
        """Begin a run. Collective: ranks that are about to do different things raise here, instead of waiting.

        Args:
            description: of what is to be run, and of the inputs; equal on every rank.
            keys: the form of each micro-batch's inputs; together with the kind of a message it decides the form of the
                message. Equal on every rank.
            renews: messages of this rank's stages may have another form from now on (a layer was unfrozen): all ranks
                drop the forms that they know.

        Raises:
            DifferentInputsError: the descriptions differ; shows them.
        """
        self._queues.clear()
        self._source.clear()
        self._arrived.clear()
        self._keys = keys
        self._compare(description, renews=renews)

    def end_run(self, description: str) -> None:
        """Compare what was not known when the run began. Collective.

        Args:
            description: equal on every rank.

        Raises:
            DifferentInputsError: the descriptions differ; shows them.
        """
        self._compare(description)

    def _compare(self, description: str, *, renews: bool = False) -> None:
        """Raise the same error on all ranks if their descriptions differ; drop all forms if one of them renews."""
        host = self._host
        if host.size == 1:
            return
        digest = hashlib.blake2b(description.encode(), digest_size=_DIGEST_BYTES).digest()
        own, everyone = (Buffer.allocate((_DIGEST_BYTES + 1) * n, DType.UINT8) for n in (1, host.size))
        own.bytes()[:] = digest + bytes([renews])
        host.allgather(own, everyone).wait()
        found = everyone.bytes().tobytes()
        told = [found[start : start + _DIGEST_BYTES + 1] for start in range(0, len(found), _DIGEST_BYTES + 1)]
        if any(each[-1] for each in told):
            self._agreement = KnownForms()
        if all(each[:-1] == digest for each in told):
            return
        everywhere = gather_objects(host, description)
        listed = "; ".join(f"rank {host.members[rank]}: {text}" for rank, text in enumerate(everywhere))
        raise DifferentInputsError(
            "the ranks of a pipeline must be called with the same: inputs and targets are those of the whole pipeline, "
            "on each of its ranks. Divide the data by ud.shard(), or by ud.data_rank() and ud.data_size(), and seed "
            f"what draws them by ud.seed(n). Found: {listed}"
        )

    def send(self, fact: Fact, message: Message, *, to: int) -> None:
        """Begin to send the message that brings `fact`; in the order of the schedule.

        Raises:
            StageFormError: it has another form than earlier messages of its kind.
        """
        while self._sending and self._sending[0][0].done():
            self._sending.popleft()
        key = self._keys[fact[2]]
        what = _describe(fact)
        if self._agreement.find(fact, key) is None:
            header = pack(message.form)
            size = Buffer.allocate(1, DType.INT64)
            size.bytes().cast("q")[0] = len(header)
            self._post(size, to, f"size of the form of {what}")
            self._post(Buffer.of(header), to, f"form of {what}")
            self._agreement.learn(fact, key, message.form)
        else:
            self._agreement.check(fact, key, message.form)
        for tensor in message.tensors:
            self._post(self._framework.buffer(tensor), to, what)

    def receive(self, fact: Fact, *, source: int) -> None:
        """Begin to receive the message that brings `fact`, as far as possible; in the order of the schedule.

        Where messages have to be issued in matching order, the first of a kind waits for its form, and so for its
        sender.

        Raises:
            PeerLostError: the sender is lost, or did not arrive.
        """
        self._source[fact] = source
        queue = self._queues.setdefault(source, deque())
        queue.append(_Incoming(fact))
        self._post_known(source)
        if self._matched:
            with self._waiting(f"waited for the form of {_describe(fact)} from rank {self._world(source)}"):
                while queue:
                    self._learn(source)

    def wait_for(self, fact: Fact) -> Message:
        """Wait for the message that brings `fact`, for which `receive` was called, and return it.

        Raises:
            PeerLostError: its sender is lost, or did not arrive.
        """
        source = self._source.pop(fact)
        with self._waiting(f"waited for {_describe(fact)} from rank {self._world(source)}"):
            while fact not in self._arrived:
                self._learn(source)
            item = self._arrived.pop(fact)
            assert item.form is not None
            assert item.works is not None
            for work in item.works:
                work.wait()
        tensors: list[Any] = [
            self._framework.tensor(buffer, form.shape)
            for buffer, form in zip(item.buffers, item.form.tensors, strict=True)
        ]
        return Message(item.form, tensors)

    def wait_sends(self) -> None:
        """Wait until everything is sent.

        Raises:
            PeerLostError: a receiver is lost, or did not arrive.
        """
        while self._sending:
            work, _, to, what = self._sending.popleft()
            with self._waiting(f"waited for rank {self._world(to)} to take {what}"):
                work.wait()

    def _post(self, buffer: Buffer, to: int, what: str) -> None:
        work = self._route(buffer.memory).send(buffer, to=to)
        self._sending.append((work, buffer, to, what))

    def _post_known(self, source: int) -> None:
        """Begin to receive the first messages of the queue, as far as their forms are known."""
        queue = self._queues[source]
        while queue:
            item = queue[0]
            form = self._agreement.find(item.fact, self._keys[item.fact[2]])
            if form is None:
                return
            queue.popleft()
            item.form = form
            item.buffers = [self.allocate(each) for each in form.tensors]
            item.works = [self._route(each.memory).recv(each, source=source) for each in item.buffers]
            self._arrived[item.fact] = item

    def _learn(self, source: int) -> None:
        """Receive the form of the first message of the queue, and wait for it."""
        item = self._queues[source][0]
        size = Buffer.allocate(1, DType.INT64)
        self._host.recv(size, source=source).wait()
        data = bytearray(size.bytes().cast("q")[0])
        self._host.recv(Buffer.of(data), source=source).wait()
        self._agreement.learn(item.fact, self._keys[item.fact[2]], unpack(data))
        self._post_known(source)

    def allocate(self, form: TensorForm) -> Buffer:
        """Return memory on this rank for an incoming tensor."""
        count = 1
        for size in form.shape:
            count *= size
        if form.memory == HOST:
            return Buffer.allocate(count, form.dtype)
        return self._framework.allocate(count, form.dtype, self._memory)

    def communicator(self, memory: str) -> Communicator:
        """Return the communicator of all ranks for a kind of memory: for collectives between the runs."""
        return self._route(memory).communicator

    def _route(self, memory: str) -> Routes:
        kind = memory.partition(":")[0]
        found = self._routes.get(kind)
        if found is None:
            raise UsageError(
                f"a stage passes on a tensor in memory of kind {memory!r}, but this rank's model is in "
                f"{self._memory!r}; put the whole model on one device"
            )
        return found

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Add to the error of a lost peer what this rank was doing."""
        try:
            yield
        except PeerLostError as error:
            rank = self._world(self._host.rank)
            raise type(error)(f"{error} (rank {rank} {what}, in a pipeline)", ranks=error.ranks) from error

    def _world(self, rank: int) -> int:
        return self._host.members[rank]


def _describe(fact: Fact) -> str:
    word, stage, microbatch = fact
    return f"the {word} stage {stage}, micro-batch {microbatch}"
