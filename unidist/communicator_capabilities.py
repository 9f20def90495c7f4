"""Capabilities that a communicator may have beyond its contract. Callers ask for them by isinstance.

`SharesMemory`: its ranks, all on one host, can map the same memory; without it, copies have to be sent.
`MakesSubgroups`: some of its ranks can form a group while the others do something else.
`ExchangesBlocks`: it does a cycle of named operations in one call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta

from typing_extensions import override

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator, ReduceOp, Work
from unidist.rendezvous import Rendezvous

__all__ = ["AT_ONCE_NS", "ExchangesBlocks", "MakesSubgroups", "OneRanksMemory", "SharedMemory", "SharesMemory"]


class SharedMemory(ABC):
    """Memory that every rank of a group maps, with two views of it.

    All ranks see what a rank writes to `shared`, in `shared` and in `view`. What it writes to `view` is private: from
    then on its `view` shows private copies of the written pages, until it calls `publish`. So `view` can be handed to
    the script as if it were this rank's private memory, and uses no memory as long as it is not written to.

    Nothing here waits for other ranks: the writer of `shared` makes sure, with a barrier, that no rank reads it.

    Attributes:
        shared: `(nbytes,)` uint8, zeros at first.
        view: the same bytes.
    """

    shared: Buffer
    view: Buffer

    @abstractmethod
    def publish(self, own: Sequence[tuple[int, int]]) -> None:
        """Copy this rank's writes to its part of `view` to `shared`; then `view` shows `shared` again.

        Writes outside of its part are discarded. Not collective.

        Args:
            own: first byte and number of bytes of each range in this rank's part.
        """


class SharesMemory(ABC):
    """Capability of a communicator: allocates memory that all its ranks map. Found by isinstance."""

    @abstractmethod
    def sharing_obstacle(self) -> str:
        """Return why this group cannot share memory, or "" if it can. The same on all ranks; not collective."""

    @abstractmethod
    def allocate_shared(self, nbytes: int) -> SharedMemory:
        """Return memory that all ranks of the group share. Collective, like every operation of the communicator.

        It outlives the communicator and ranks that die: each rank's mapping ends with the last reference to the
        owner of `shared` or `view` on that rank, the memory itself with the last mapping.

        Args:
            nbytes: the same on every rank.

        Raises:
            ConfigurationError: on every rank if there is too little memory, or a `sharing_obstacle`.
            MismatchError: the ranks asked for different amounts.
        """


AT_ONCE_NS = 5_000_000
"""How long `ExchangesBlocks.exchange_blocks` waits for ranks that are on their way."""


class ExchangesBlocks(ABC):
    """Capability of a communicator: gathers small blocks in one call, and reduces what goes with them. By isinstance.

    Without it named operations do the same by `allgather`: other ranks of the group may do so.
    """

    @abstractmethod
    def exchange_blocks(
        self,
        own: Buffer,
        everyone: Buffer,
        block: bytes,
        source: Buffer | None = None,
        target: Buffer | None = None,
        op: ReduceOp = ReduceOp.SUM,
        scale: float = 1.0,
    ) -> bool | Work:
        """Do an all-gather of `own` to `everyone`, with `block` and the data of `source` at its beginning.

        Args:
            own: `(n,)` uint8, engine memory, n the same on every rank.
            everyone: `(size * n,)` uint8, engine memory.
            block: goes to the beginning of `own`; as long on every rank.
            source: `(count,)` elements in host memory, for the place behind it; None: nothing.
            target: gets the reduction of all ranks' data if their blocks are equal, in rank order; like `source`.
            op: the reduction.
            scale: of its result, see `Communicator.allreduce`.

        Returns:
            True if all ranks have sent the same block, and `target` is filled. False if the caller has to look at
            `everyone`, where the blocks may still be equal. Where other ranks have not come within
            `AT_ONCE_NS`, a work to wait for before that.
        """


class MakesSubgroups(ABC):
    """Capability of a communicator: makes groups of some of its ranks, without the others. Found by isinstance.

    `Communicator.split` needs every rank of the group; this needs the members alone, and any way by which they meet.
    """

    @abstractmethod
    def subgroup(self, ranks: Sequence[int], rendezvous: Rendezvous, *, timeout: timedelta) -> Communicator:
        """Return an independent communicator over `ranks`. Collective over these ranks alone.

        Memory that either communicator allocates is engine memory of both.

        Args:
            ranks: members by their rank in this communicator, in their order in the new one; this rank is among them.
            rendezvous: of the members, in the same order.
            timeout: longest wait for the other members, and default timeout of the new communicator.

        Raises:
            UsageError: this rank is not among `ranks`, or one is there twice.
            MismatchError: the members passed different ranks.
            StalledError: a member did not come.
        """


class OneRanksMemory(SharedMemory):
    """The trivial implementation, for a group of one rank.

    Args:
        nbytes: size.
    """

    def __init__(self, nbytes: int) -> None:
        self.shared = self.view = Buffer.allocate(nbytes, DType.UINT8)

    @override
    def publish(self, own: Sequence[tuple[int, int]]) -> None:
        """Return at once: writes are already in place."""
