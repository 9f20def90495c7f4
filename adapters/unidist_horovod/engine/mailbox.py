"""The packets of one communicator: its messages, and the notices of its peers."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass

from typing_extensions import override

from unidist.buffer import Buffer
from unidist_horovod.engine.links import Incoming, PacketKind, Receiver

_MAX_ARRIVALS = 1024


@dataclass
class Receipt:
    """A receive: `buffer`, seen as `view`, is filled when `complete`; `found` is the size of the message that came."""

    buffer: Buffer
    view: memoryview
    complete: bool = False
    found: int = -1


@dataclass
class _Arrived:
    """A message that arrived before it was asked for."""

    data: bytearray
    receipt: Receipt | None = None
    complete: bool = False

    def hand_over(self) -> None:
        """Give the data to the receipt, once both are there."""
        if self.complete and self.receipt is not None:
            _fill(self.receipt, self.data)


class Mailbox(Receiver):
    """Takes the packets of one communicator. Peers are ranks of the world.

    Attributes:
        aborted: who aborted, and why; "" if nobody did.
        aborted_by: the rank that did; -1 if it is not known.
        activity: how many signs of life, on behalf of a joined rank, have come.
    """

    def __init__(self) -> None:
        self.aborted = ""
        self.aborted_by = -1
        self.activity = 0
        self._arrivals: dict[int, set[int]] = {}
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[Receipt]] = defaultdict(deque)
        self._arrived: dict[int, deque[_Arrived]] = defaultdict(deque)
        self._num_unclaimed: dict[int, int] = defaultdict(int)

    def expect(self, peer: int, buffer: Buffer) -> Receipt:
        """Ask for the next message of `peer`; the buffer is kept until it has come."""
        receipt = Receipt(buffer, buffer.bytes())
        with self._lock:
            if self._arrived[peer]:
                message = self._arrived[peer].popleft()
                self._num_unclaimed[peer] -= len(message.data)
                message.receipt = receipt
                message.hand_over()
            else:
                self._waiting[peer].append(receipt)
        return receipt

    @override
    def begin(self, peer: int, nbytes: int) -> Incoming:
        with self._lock:
            if self._waiting[peer]:
                receipt = self._waiting[peer].popleft()
                if len(receipt.view) == nbytes:
                    return Incoming(receipt.view, lambda: _mark(receipt, nbytes))
                return Incoming(memoryview(bytearray(nbytes)), lambda: _mark(receipt, nbytes))
            message = _Arrived(bytearray(nbytes))
            self._arrived[peer].append(message)
            self._num_unclaimed[peer] += nbytes
            return Incoming(memoryview(message.data), lambda: self._complete(message))

    @override
    def notice(self, peer: int, kind: PacketKind, value: int, payload: bytes) -> None:
        if kind is PacketKind.ABORT:
            self.abort(payload.decode(errors="replace"), by=peer)
        elif kind is PacketKind.ARRIVED:
            with self._lock:
                self._arrivals.setdefault(value, set()).add(peer)
                if len(self._arrivals) > _MAX_ARRIVALS:
                    del self._arrivals[next(iter(self._arrivals))]
        elif kind is PacketKind.ACTIVE:
            self.activity += 1

    def arrived(self, number: int) -> set[int]:
        """Return the peers that have reported to wait in collective `number`."""
        with self._lock:
            return set(self._arrivals.get(number, ()))

    @override
    def unclaimed(self, peer: int) -> int:
        with self._lock:
            return 0 if self._waiting[peer] else self._num_unclaimed[peer]

    def abort(self, reason: str, *, by: int = -1) -> None:
        """Take note of an abort; the first one stays."""
        if not self.aborted:
            self.aborted, self.aborted_by = reason, by

    def _complete(self, message: _Arrived) -> None:
        with self._lock:
            message.complete = True
            message.hand_over()


def _mark(receipt: Receipt, nbytes: int) -> None:
    receipt.found = nbytes
    receipt.complete = True


def _fill(receipt: Receipt, data: bytearray) -> None:
    if len(receipt.view) == len(data):
        receipt.view[:] = data
    _mark(receipt, len(data))
