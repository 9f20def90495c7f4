"""The layout of a group over hosts, and which rank communicates with which other host. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The hosts of a group.

    A rank's *index* is its place among the ranks of its host. Ranks of equal index on all hosts form a *row*; rows
    carry what travels between hosts, each a part of it. Only indices that every host has make a row.

    Args:
        hosts: the ranks of each host, ascending; hosts in order of their lowest rank.
    """

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, host_of: Sequence[Hashable]) -> Layout:
        """Return the layout of a group, given the host of each rank."""
        hosts: dict[Hashable, list[int]] = {}
        for rank, host in enumerate(host_of):
            hosts.setdefault(host, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in hosts.values()))

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return min(map(len, self.hosts))

    @property
    def is_regular(self) -> bool:
        """Return whether all hosts have equally many ranks, and each host consecutive ones, in the order of hosts."""
        in_order = [rank for ranks in self.hosts for rank in ranks]
        return in_order == sorted(in_order) and {len(ranks) for ranks in self.hosts} == {self.num_rows}

    def row(self, index: int) -> tuple[int, ...]:
        """Return the ranks of a row, by host."""
        return tuple(ranks[index] for ranks in self.hosts)

    def host_of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return next(i for i, ranks in enumerate(self.hosts) if rank in ranks)

    def index_of(self, rank: int) -> int:
        """Return a rank's index on its host."""
        return self.hosts[self.host_of(rank)].index(rank)

    def pieces(self, count: int) -> list[int]:
        """Return how many of `count` elements each row carries between hosts: as equally as it goes."""
        each, rest = divmod(count, self.num_rows)
        return [each + (row < rest) for row in range(self.num_rows)]
