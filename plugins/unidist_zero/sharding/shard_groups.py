"""Shard groups: the communicators over the ranks that hold the shards of one bucket, for one kind of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import Communicator

if TYPE_CHECKING:
    from unidist.framework import Framework


@dataclass(frozen=True)
class ShardGroup:
    """This rank's communicators for one kind of memory.

    Args:
        communicator: over the ranks of the group, which hold different shards; a rank's number in it is that of its
            shard.
        replicas: over the ranks that hold the same shard as this one, in other groups; None: there is one group only.
    """

    communicator: Communicator
    replicas: Communicator | None = None

    def close(self) -> None:
        """Close both."""
        self.communicator.close()
        if self.replicas is not None:
            self.replicas.close()


def make_shard_group(everyone: Communicator, num_shards: int) -> ShardGroup:
    """Divide a communicator into groups of `num_shards` neighbours. Collective over `everyone`.

    Args:
        everyone: all ranks of the data axis. The group takes it over if it has all ranks.
        num_shards: ranks of a group; divides the size of `everyone`.
    """
    if num_shards == everyone.size:
        return ShardGroup(everyone)
    shard, replicas = (everyone.split(group) for group in groups_of(everyone.rank, everyone.size, num_shards))
    assert shard is not None
    assert replicas is not None
    return ShardGroup(shard, replicas)


def groups_of(rank: int, size: int, num_shards: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the ranks of this rank's shard group, and those that hold the same shard; both include `rank`.

    Groups consist of neighbours, because the ranks of a host are neighbours: shards travel within a host, sums across
    hosts.
    """
    first = rank - rank % num_shards
    return range(first, first + num_shards), range(rank % num_shards, size, num_shards)


def allocate(framework: Framework, communicator: Communicator, kind: str, nbytes: int) -> Buffer:
    """Return zeroed bytes of a kind of memory, which the communicator moves without a copy if it can."""
    return communicator.allocate(nbytes) if kind == HOST else framework.allocate(nbytes, DType.UINT8, kind)
