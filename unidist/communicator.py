"""The communicator: collectives and point-to-point messages on one group of ranks.

The ordering rule, stated once for every method below: **every rank of the group issues the same
collectives in the same order**, with equal counts, dtypes, reductions and roots. An engine that can see a
violation raises `MismatchError` on every rank; one that cannot ends in `StalledError` at the timeout.
Messages between two ranks arrive in the order in which they were sent.

A rank here is an index into the group: `0 <= rank < size`. `members[rank]` is its rank in the world.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any, ClassVar

from unidist.buffer import HOST, Buffer, DType
from unidist.errors import UsageError
from unidist.observation import GroupCalls, Method, Waitable, observe, observe_methods, operating

__all__ = [
    "COMPLETED",
    "Capabilities",
    "Communicator",
    "CompletedWork",
    "MessageOrder",
    "ReduceOp",
    "ReportsArrivals",
    "Work",
    "equal_counts",
    "format_ranks",
    "hash_ranks",
]

_POLL_SEC = 100e-6
_OPERATIONS = (
    *("allreduce", "allgather", "broadcast", "reducescatter", "alltoall", "barrier", "send", "recv"),
    *("allocate_shared", "exchange_blocks"),  # of capabilities
)


class ReduceOp(StrEnum):
    """The operation of a reduction over ranks. On bool, SUM and MAX are "or", PRODUCT and MIN are "and"."""

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"


class MessageOrder(StrEnum):
    """The orders in which the ranks of a communicator may issue messages, among each other and among collectives."""

    NONE = "none"
    """There are no messages: `send` and `recv` raise UsageError."""
    ANY = "any"
    """Any order. A send that its receiver has not taken yet holds up nothing else."""
    MATCHED = "matched"
    """Orders in which every operation could be waited for before the next one.

    The operations of a communicator run one after the other on each rank, a send until its receiver takes it. So two
    ranks that both send before they receive wait for each other. A communicator over which one rank sends and another
    one receives is always in order, and an all-to-all moves messages of both directions at once.
    """


@dataclass(frozen=True)
class Capabilities:
    """The declared capabilities of an engine; they are not probed.

    Args:
        memory_kinds: the kinds of memory that it moves: "host", "cuda".
        dtypes: element types it reduces and moves.
        messages: whether there are send and recv, and in which order the ranks may issue them.
        detects_mismatch: differing calls raise MismatchError on every rank.
        negotiates: the engine matches operations by name itself (Horovod); our negotiation is bypassed.
        engine_memory: `allocate` returns memory that collectives use without a copy.
        bucket_bytes: gradient bucket size at which this engine performs well.
        waits_in_queue: `Work.wait` orders the queue of the device that the caller computes on behind the operation, and
            returns at once. Else it returns when the operation is complete.
        num_pending: collectives that may be under way on a rank before its peers take part: to post another waits for
            them. None: any number.
        adds_in_rank_order: an all-reduce of up to 4 KiB and 8 ranks has the bits of
            `unidist.algorithms.CompiledKernel`, so named operations may do it in the exchange by which they agree.
    """

    memory_kinds: frozenset[str] = frozenset((HOST,))
    dtypes: frozenset[DType] = field(default_factory=lambda: frozenset(DType))
    messages: MessageOrder = MessageOrder.ANY
    detects_mismatch: bool = False
    negotiates: bool = False
    engine_memory: bool = False
    bucket_bytes: int = 25 << 20
    num_pending: int | None = None
    waits_in_queue: bool = False
    adds_in_rank_order: bool = False


class Work(Waitable):
    """A pending operation. Its buffers belong to the engine until `wait` has returned or `done()` is True."""

    @abstractmethod
    def wait(self, timeout: timedelta | None = None) -> None:
        """Return when the operation is complete on this rank: targets hold the result, sources may be reused.

        Args:
            timeout: longest wait; default: the communicator's timeout. If it runs out, the communicator is
                aborted on this rank.

        Raises:
            MismatchError: the ranks did not call the same operation (engines with `detects_mismatch`).
            PeerLostError: a peer died or the communicator was aborted.
            StalledError: the timeout ran out; the message names the operation and, if known, the ranks.
        """

    @abstractmethod
    def done(self) -> bool:
        """Return whether `wait` would return at once (or raise). Never blocks; may advance the operation."""

    def poll(self, limit: timedelta) -> bool:
        """Wait for `limit` at most, and return what `done` does then.

        Unlike in `wait`, nothing ends when the time runs out, and other threads may issue operations meanwhile. Here it
        looks again and again; an engine that can sleep until something happens overrides it.
        """
        deadline = time.monotonic() + limit.total_seconds()
        while not self.done():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SEC)
        return True


class CompletedWork(Work):
    """The trivial work: an operation that was complete when the call returned."""

    can_block: ClassVar[bool] = False

    def wait(self, timeout: timedelta | None = None) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Return True."""
        return True


COMPLETED = CompletedWork()


class Communicator(ABC):
    """Collectives on one group of ranks; see the module's text for the ordering rule.

    Thread use: one thread at a time issues operations; `abort` may be called from any thread at any time.

    Attributes:
        rank: this process's index in the group.
        size: number of ranks in the group.
        members: world rank of each member, by group rank.
        timeout: default time for which an operation waits for its peers.
        capabilities: of the engine.
        description: the engine's name and the group, for messages ("shm, ranks 0-3").
        observed: the record of this rank's calls, see `observe`; None: nobody looks at it.
    """

    rank: int
    size: int
    members: tuple[int, ...]
    timeout: timedelta
    capabilities: Capabilities
    description: str
    observed: GroupCalls | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the operations of an engine keep record."""
        super().__init_subclass__(**kwargs)
        observe_methods(cls, {**dict.fromkeys(_OPERATIONS, operating), "split": _splitting})

    @abstractmethod
    def allreduce(self, source: Buffer, target: Buffer, *, op: ReduceOp = ReduceOp.SUM, scale: float = 1.0) -> Work:
        """Reduce `source` of all ranks into `target` on each.

        Args:
            source: `(n,)` elements, the same n and dtype on every rank. Not changed unless it is the target.
            target: `(n,)` elements; may be the same memory as `source` (in place), not overlap otherwise.
            op: the reduction. 16-bit floats are added up in at least their own precision.
            scale: the result is multiplied by this before it is stored (1/size gives the mean). On integers
                the product is computed in float64 and truncated toward zero.
        """

    @abstractmethod
    def allgather(self, source: Buffer, target: Buffer, *, counts: Sequence[int] | None = None) -> Work:
        """Concatenate the sources of all ranks, in rank order, into `target` on each.

        Args:
            source: `(counts[rank],)` elements; may be this rank's own piece of `target`.
            target: `(sum(counts),)` elements.
            counts: elements from each rank; default: the same number from each. Equal on every rank.
        """

    @abstractmethod
    def broadcast(self, buffer: Buffer, *, root: int) -> Work:
        """Copy `buffer` of rank `root` into `buffer` of every other rank. Equal sizes everywhere."""

    @abstractmethod
    def reducescatter(
        self,
        source: Buffer,
        target: Buffer,
        *,
        op: ReduceOp = ReduceOp.SUM,
        scale: float = 1.0,
        counts: Sequence[int] | None = None,
    ) -> Work:
        """Reduce `source` of all ranks and leave piece `rank` of the result in `target`.

        Args:
            source: `(sum(counts),)` elements, equally many on every rank.
            target: `(counts[rank],)` elements; may be this rank's own piece of `source`.
            op: the reduction, see `allreduce`.
            scale: factor, see `allreduce`.
            counts: elements that each rank keeps; default: the same number on each. Equal on every rank.
        """

    @abstractmethod
    def alltoall(
        self, source: Buffer, target: Buffer, *, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Work:
        """Send piece i of `source` to rank i, and receive piece j of `target` from rank j.

        Args:
            source: `(sum(send_counts),)` elements.
            target: `(sum(receive_counts),)` elements; does not overlap `source`.
            send_counts: elements for each rank.
            receive_counts: elements from each rank; rank i's `send_counts[j]` equals rank j's `receive_counts[i]`.
        """

    @abstractmethod
    def send(self, buffer: Buffer, *, to: int) -> Work:
        """Send `buffer` to rank `to`. The call does not wait for the receiver; the returned work may.

        The order of messages is limited by `capabilities.messages`.
        """

    @abstractmethod
    def recv(self, buffer: Buffer, *, source: int) -> Work:
        """Receive the next message of rank `source`, which must have exactly the size of `buffer`."""

    @abstractmethod
    def barrier(self) -> Work:
        """Complete once every rank of the group has called it."""

    @abstractmethod
    def split(self, ranks: Sequence[int]) -> Communicator | None:
        """Divide the group: ranks that pass the same list form a new, independent communicator.

        Collective over the whole group: every rank passes the group that it will belong to, including itself,
        or `()` for none (it gets None). Lists of different groups do not overlap. `split(range(size))` gives an
        independent communicator over the same ranks.

        Args:
            ranks: members by their rank in this group, in their order in the new one.
        """

    def allocate(self, nbytes: int) -> Buffer:
        """Return `(nbytes,)` uint8 of zeroed host memory, which this engine moves without a copy if it can.

        Not collective. The memory is released with the last reference to the buffer's owner.

        Raises:
            ConfigurationError: there is too little memory; the message says how much is needed.
        """
        return Buffer.allocate(nbytes, DType.UINT8)

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End all pending and later operations of this communicator with PeerLostError, here and on its peers.

        Here they end so even if the communicator is closed before they notice.

        Callable from any thread, any number of times. `reason` becomes part of the peers' error message if
        the engine can send it.
        """

    @abstractmethod
    def close(self) -> None:
        """Release threads, files and memory. Not collective; pending work is undefined. Idempotent."""

    # The following methods are common to all engines.

    def check_rank(self, rank: int, role: str) -> None:
        """Raise UsageError unless `rank` is one of this group; `role` names the argument."""
        if not 0 <= rank < self.size:
            raise UsageError(
                f"{role}={rank} is not a rank of this group; choices: 0 to {self.size - 1} ({self.description})"
            )


def _splitting(plain: Method) -> Method:
    """Wrap `split` of a communicator: the parts are observed too."""
    collective = operating(plain)

    def split(self: Communicator, ranks: Sequence[int]) -> Communicator | None:
        made: Communicator | None = collective(self, ranks)
        group = self.observed
        if group is not None:
            group.splits += 1
            if made is not None and group.observer is not None:
                observe(made, f"{group.name}.{group.splits}[{format_ranks(made.members)}]", group.observer)
        return made

    return split


class ReportsArrivals(ABC):
    """Capability of a communicator: reports which ranks an operation is waiting for. Found by isinstance."""

    @abstractmethod
    def waiting_for(self) -> Sequence[int]:
        """Return the group ranks that have not yet entered the operation this rank is waiting on.

        Called from any thread at any time, also while the operation blocks another one. Empty when nothing
        waits, everybody came, or it is not known.
        """


def equal_counts(total: int, size: int) -> list[int]:
    """Return `size` equal pieces of `total`; raises UsageError unless it divides."""
    if total % size:
        raise UsageError(f"{total} elements do not divide over {size} ranks; pass counts")
    return [total // size] * size


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks for a message: "0-3" or "0, 2, 5"."""
    ordered = sorted(ranks)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}-{ordered[-1]}"
    return ", ".join(map(str, ordered))


def hash_ranks(ranks: Sequence[int]) -> int:
    """Return a number of 64 bits by which members compare the lists that they passed; the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(tuple(ranks)).encode(), digest_size=8).digest(), "little")
