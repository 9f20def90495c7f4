"""Who shares with whom: the communicators of one kind of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import Communicator

if TYPE_CHECKING:
    from unidist.framework import Framework


@dataclass(frozen=True)
class Lane:
    """Communicators for one kind of memory, on this rank.

    Args:
        shard: over the ranks that hold different shards; a rank's number in it is the number of its shard.
        replicas: over the ranks that hold the same shard as this one; None: there are no others.
    """

    shard: Communicator
    replicas: Communicator | None = None

    def close(self) -> None:
        """Close both."""
        self.shard.close()
        if self.replicas is not None:
            self.replicas.close()


def make_lane(everyone: Communicator, num_shards: int) -> Lane:
    """Divide a communicator into groups of `num_shards` neighbours that share. Collective over `everyone`.

    Args:
        everyone: all ranks of the data axis; becomes the lane's own where all of them share.
        num_shards: ranks that share; divides the size of `everyone`.
    """
    if num_shards == everyone.size:
        return Lane(everyone)
    shard, replicas = (everyone.split(group) for group in groups_of(everyone.rank, everyone.size, num_shards))
    assert shard is not None
    assert replicas is not None
    return Lane(shard, replicas)


def groups_of(rank: int, size: int, num_shards: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the ranks that share with `rank`, and those that hold the same shard; both include it.

    Neighbours share, because ranks of one host are neighbours: shards travel inside of a host, sums across hosts.
    """
    first = rank - rank % num_shards
    return range(first, first + num_shards), range(rank % num_shards, size, num_shards)


def allocate(framework: Framework, communicator: Communicator, kind: str, nbytes: int) -> Buffer:
    """Return zeroed bytes of a kind of memory, which the communicator moves without a copy where there is such."""
    return communicator.allocate(nbytes) if kind == HOST else framework.allocate(nbytes, DType.UINT8, kind)
