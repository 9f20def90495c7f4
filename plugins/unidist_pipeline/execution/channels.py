"""The messages of one rank of a pipeline: receives are posted early, sends are waited for at the end.

The first message of a kind is preceded by its description (`messages.Form`). Until that has arrived, nothing after it
can be received from the same rank either, because messages arrive in order; later messages are queued, and posted as
soon as their form is known. A rank waits here only for what it needs to compute, so an engine whose sends wait for the
receiver cannot deadlock.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import Communicator, Work
from unidist.errors import ConfigurationError, PeerLostError, UsageError
from unidist.framework import Framework
from unidist.negotiation.objects import gather_objects
from unidist_pipeline.execution.messages import Form, KnownForms, Message, TensorForm, pack, unpack
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
        communicators: along the pipeline, by kind of memory; used by nobody else. "host" is required.
        framework: of the tensors.
        memory: of this rank's tensors of other kinds than "host" ("cuda:1").

    Raises:
        ConfigurationError: an engine has no messages.
    """

    def __init__(self, communicators: Mapping[str, Communicator], framework: Framework, *, memory: str = HOST) -> None:
        for kind, communicator in communicators.items():
            if communicator.size > 1 and not communicator.capabilities.point_to_point:
                raise ConfigurationError(
                    f"pipeline: stages send each other messages, and the engine of {kind} memory "
                    f"({communicator.description}) has collectives only. Use --engine gloo"
                )
        self._communicators = communicators
        self._host = communicators[HOST]
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
        """Begin to receive the message that brings `fact`, as far as possible; in the order of the schedule."""
        self._source[fact] = source
        queue = self._queues.setdefault(source, deque())
        queue.append(_Incoming(fact))
        self._post_known(source)

    def wait_for(self, fact: Fact) -> Message:
        """Wait for the message that brings `fact`, for which `receive` was called, and return it.

        Raises:
            PeerLostError: its sender is lost, or did not arrive.
        """
        source = self._source.pop(fact)
        try:
            while fact not in self._arrived:
                self._learn(source)
            item = self._arrived.pop(fact)
            assert item.form is not None
            assert item.works is not None
            for work in item.works:
                work.wait()
        except PeerLostError as error:
            raise self._explained(error, f"waited for {_describe(fact)} from rank {self._world(source)}") from error
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
            try:
                work.wait()
            except PeerLostError as error:
                raise self._explained(error, f"waited for rank {self._world(to)} to take {what}") from error

    def _post(self, buffer: Buffer, to: int, what: str) -> None:
        communicator = self.communicator(buffer.memory)
        self._sending.append((communicator.send(buffer, to=to), buffer, to, what))

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
            item.works = [self.communicator(each.memory).recv(each, source=source) for each in item.buffers]
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
        """Return the communicator for a kind of memory."""
        kind = memory.partition(":")[0]
        found = self._communicators.get(kind)
        if found is None:
            raise UsageError(
                f"a stage passes on a tensor in memory of kind {memory!r}, but this rank's model is in "
                f"{self._memory!r}; put the whole model on one device"
            )
        return found

    def _explained(self, error: PeerLostError, what: str) -> PeerLostError:
        """Return the error with a note on what this rank was doing."""
        host = self._host
        return type(error)(f"{error} (rank {self._world(host.rank)} {what}, in a pipeline)", ranks=error.ranks)

    def _world(self, rank: int) -> int:
        return self._host.members[rank]


def _describe(fact: Fact) -> str:
    word, stage, microbatch = fact
    return f"the {word} stage {stage}, micro-batch {microbatch}"
