"""Agreement on an order of operations without a coordinator: each rank applies the same updates to the same tables.

An announcement of cycle k reaches every rank in cycle k. So after each cycle all ranks have equal tables of the ranks'
submissions, and see the same operations become ready in the same order. A name and signature that was agreed on once
gets an id, which stands for it in later announcements. Ids are assigned and withdrawn by rules that depend on these
tables alone. Nothing here blocks, communicates or locks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from unidist.buffer import HOST, ITEM_BYTES
from unidist.communicator import ReduceOp, format_ranks
from unidist.negotiation._wire import MAX_ID_COUNT, MAX_IDS, encode_block, encode_request
from unidist.negotiation.request import OperationKind, Request, Signature, describe, match_key

MAX_REQUEST_BYTES = 1 << 20
"""Requests in full of one rank in one cycle; the rest waits for the next cycle."""


class Ready(NamedTuple):
    """An operation that every rank has submitted.

    Args:
        name: what the ranks matched by.
        signatures: by rank; of a rank that has joined, and so contributes zeros, that of another one.
        mismatch: empty, or what each rank asked for when that does not go together.
        last_joined: of a join: the rank that joined last.
    """

    name: str
    signatures: tuple[Signature, ...]
    mismatch: str = ""
    last_joined: int = -1


class CycleMessage(NamedTuple):
    """This rank's message in a cycle.

    Args:
        block: for the first exchange.
        requests: in full, for the second exchange; empty when all were known.
        num_requests: how many of the submitted requests it holds; the others wait for the next cycle.
        known: per request its operation, as all ranks remember it, when `requests` is empty.
        carrying: the block to send in place of `block` if the data of the only request goes with it; b"": it cannot.
    """

    block: bytes
    requests: bytes
    num_requests: int
    known: list[Ready]
    carrying: bytes = b""


@dataclass(slots=True)
class _Known:
    """A name that was agreed on before, its id and what each rank asked for then."""

    id: int
    operation: Ready
    own: Signature
    block: bytes
    """Announces this name alone."""
    carrying: bytes
    """The same, with data; b"": it is too large."""


class Agreement:
    """The tables of one rank; equal on all ranks after each `update`.

    Args:
        rank: this rank.
        size: number of ranks.
        capacity: how many names have an id at a time; the oldest id is reused. 0: none. Equal on every rank.
        room: bytes of data that go with a rank's message of a cycle. Equal on every rank.
    """

    def __init__(self, rank: int, size: int, *, capacity: int = 8192, room: int = 0) -> None:
        assert capacity <= MAX_ID_COUNT
        self._room = room
        self.waiting: dict[str, dict[int, Signature]] = {}
        """Operations that some ranks have submitted, and what, by rank; in the order of their first announcement."""
        self.joined: dict[int, None] = {}
        """The ranks that have joined, in the order in which they did."""
        self._rank, self._size, self._capacity = rank, size, capacity
        self._known: dict[str, _Known] = {}
        self._by_id: list[_Known] = []
        self._next_id = 0

    def knows(self, request: Request) -> bool:
        """Return whether this very request was agreed on before, so that it need not be checked. From any thread."""
        known = self._known.get(request.name)
        return known is not None and known.own == request.signature

    def carrying(self, request: Request) -> bytes:
        """Return the block that announces this request alone, with its data; b"" if there is none."""
        known = self._known.get(request.name)
        return known.carrying if known is not None and known.own == request.signature else b""

    def announce(self, requests: Sequence[Request]) -> CycleMessage:
        """Return the announcement of these newly submitted requests, or of as many as fit."""
        if len(requests) == 1:  # the latency of a loop that waits for each operation
            known = self._known.get(requests[0].name)
            if known is not None and known.own == requests[0].signature:
                return CycleMessage(known.block, b"", 1, [known.operation], known.carrying)
        ids: list[int] = []
        operations: list[Ready] = []
        full: list[bytes] = []
        full_bytes = 0
        count = 0
        for request in requests:
            known = self._known.get(request.name)
            if known is not None and known.own == request.signature:
                if len(ids) == MAX_IDS:
                    break
                ids.append(known.id)
                operations.append(known.operation)
            else:
                encoded = encode_request(request.name, request.signature)
                full_bytes += len(encoded) + 1
                if full and full_bytes > MAX_REQUEST_BYTES:
                    break
                full.append(encoded)
            count += 1
        joined = b"\n".join(full)
        return CycleMessage(encode_block(ids, len(joined)), joined, count, operations)

    def update(self, ids: Sequence[Sequence[int]], requests: Sequence[Sequence[tuple[str, Signature]]]) -> list[Ready]:
        """Take in what every rank announced, by rank, and return what became ready, in the agreed order.

        The order is that in which the last rank's announcement of each is found.
        """
        ready: list[Ready] = []
        for rank in range(self._size):
            for id_ in ids[rank]:
                known = self._by_id[id_].operation
                self._add(rank, known.name, known.signatures[rank], ready)
            for name, signature in requests[rank]:
                if signature.kind is OperationKind.JOIN:
                    self.joined[rank] = None
                self._add(rank, name, signature, ready)
                if signature.kind is OperationKind.JOIN:  # it now counts as having submitted whatever it has not
                    for other in list(self.waiting):
                        self._check_complete(other, ready)
        # Ids change after all announcements were read: those of this cycle were made with the ids before it.
        for operation in ready:
            if operation.signatures[0].kind is OperationKind.JOIN:
                self.joined.clear()
            elif self._capacity and not (operation.mismatch or self.joined):
                self._remember(operation)  # a joined rank would have no request that an id could stand for
        return ready

    def _add(self, rank: int, name: str, signature: Signature, ready: list[Ready]) -> None:
        self.waiting.setdefault(name, {})[rank] = signature
        self._check_complete(name, ready)

    def _check_complete(self, name: str, ready: list[Ready]) -> None:
        submitted = self.waiting[name]
        first = next(iter(submitted.values()))
        absent = [rank for rank in self.joined if rank not in submitted]
        if len(submitted) + len(absent) < self._size or (absent and first.kind is OperationKind.JOIN):
            return
        del self.waiting[name]
        signatures = tuple(submitted.get(each, first) for each in range(self._size))
        problem = _mismatch(name, signatures) or (_impossible(name, first, absent) if absent else "")
        ready.append(Ready(name, signatures, problem, next(reversed(self.joined), -1)))

    def _carrying(self, number: int, signature: Signature) -> bytes:
        """Return the block that announces an operation with its data; b"": it does not fit."""
        if signature.kind is not OperationKind.ALLREDUCE or signature.memory != HOST:
            return b""
        fits = 0 < prod(signature.shape) * ITEM_BYTES[signature.dtype] <= self._room
        return encode_block([number], 0, carries=True) if fits else b""

    def _remember(self, operation: Ready) -> None:
        known = self._known.get(operation.name)
        own = operation.signatures[self._rank]
        if known is not None:
            known.operation, known.own, known.carrying = operation, own, self._carrying(known.id, own)
            return
        number = self._next_id
        known = _Known(number, operation, own, encode_block([number], 0), self._carrying(number, own))
        self._next_id = (self._next_id + 1) % self._capacity
        if known.id < len(self._by_id):
            del self._known[self._by_id[known.id].operation.name]
            self._by_id[known.id] = known
        else:
            self._by_id.append(known)
        self._known[operation.name] = known


def _mismatch(name: str, signatures: Sequence[Signature]) -> str:
    """Return "" when the ranks' requests go together, else what each asked."""
    first = match_key(signatures[0])
    if all(signature == signatures[0] or match_key(signature) == first for signature in signatures):
        return ""
    asked: dict[str, list[int]] = {}
    for rank, signature in enumerate(signatures):
        asked.setdefault(describe(signature), []).append(rank)
    listed = "; ".join(f"{_ranks(ranks)} asked for {words}" for words, ranks in asked.items())
    return (
        f"the ranks do not agree on operation {name!r}: {listed}. "
        "Submit the same operation, dtype, shape, reduction, root and scale under one name on every rank."
    )


def _impossible(name: str, signature: Signature, joined: Sequence[int]) -> str:
    """Return "" when the ranks that have joined can take part with zeros, else why not."""
    is_neutral = signature.op is ReduceOp.SUM or (signature.op is ReduceOp.MAX and signature.dtype.is_unsigned)
    if signature.kind is OperationKind.BARRIER or (signature.kind is OperationKind.ALLREDUCE and is_neutral):
        return ""
    return (
        f"operation {name!r} ({describe(signature)}) cannot be done: {_ranks(joined)} called join, and zeros would "
        "change its result. While a rank has joined, sums, averages and barriers are possible."
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"
