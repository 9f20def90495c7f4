"""Seats the workers of an elastic job whose model is divided: whole replicas, and each part on a worker that has it.

A *replica* is a group of ranks that hold one copy of the model together. Each of them has a *part*, one position along
all axes of the mesh but the data axis. Ranks with equal parts in different replicas hold the same. So a lost rank is
replaced by a newcomer, which gets the part from one of these, or the survivors of its replica stand by. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unidist.mesh import DATA_AXIS, Mesh


@dataclass(frozen=True)
class ReplicaShape:
    """The ranks of one replica in a mesh, which is laid out row-major.

    >>> shape = ReplicaShape(outer=2, inner=2)  # a mesh of pipeline=2, data, tensor=2
    >>> shape.rank(part=3, replica=0, num_replicas=2), shape.part(5, num_replicas=2)
    (5, 3)

    Args:
        outer: number of ranks along the axes outside of the data axis, as a product.
        inner: along those inside of it.
        equation: of the size, for messages ("pipeline(2)").
    """

    outer: int = 1
    inner: int = 1
    equation: str = ""

    @classmethod
    def of(cls, mesh: Mesh) -> ReplicaShape:
        """Return the shape of a mesh's replicas."""
        outer, inner, is_inside = 1, 1, False
        for name, size in mesh.axes.items():
            if name == DATA_AXIS:
                is_inside = True
            elif is_inside:
                inner *= size
            else:
                outer *= size
        factors = [f"{name}({size})" for name, size in mesh.axes.items() if name != DATA_AXIS and size > 1]
        return cls(outer, inner, " * ".join(factors))

    @property
    def size(self) -> int:
        """Number of ranks of a replica."""
        return self.outer * self.inner

    def rank(self, part: int, replica: int, num_replicas: int) -> int:
        """Return the rank that has a part of a replica."""
        position, place = divmod(part, self.inner)
        return (position * num_replicas + replica) * self.inner + place

    def part(self, rank: int, num_replicas: int) -> int:
        """Return the part that a rank has."""
        position, rest = divmod(rank, num_replicas * self.inner)
        return position * self.inner + rest % self.inner

    def replica(self, rank: int, num_replicas: int) -> int:
        """Return the replica that a rank belongs to."""
        return rank % (num_replicas * self.inner) // self.inner


@dataclass(frozen=True)
class Candidate:
    """A worker that may get a rank.

    Args:
        worker: its number.
        host: number of its host.
        part: that it has; None: it can take any part.
        replica: that it belonged to last; None: to none.
    """

    worker: int
    host: int
    part: int | None = None
    replica: int | None = None


@dataclass(frozen=True)
class Seating:
    """The next world.

    Args:
        workers: by rank.
        parts: that each rank has, by rank.
        num_replicas: whole replicas; 0: not even one can be formed.
        over: workers that have no rank.
        vacant: parts that nobody would have in one more replica, without newcomers: what the job waits for.
    """

    workers: tuple[int, ...]
    parts: tuple[int, ...]
    num_replicas: int
    over: tuple[int, ...]
    vacant: tuple[int, ...]


def seat(shape: ReplicaShape, candidates: Sequence[Candidate], max_replicas: int) -> Seating:
    """Form as many whole replicas as possible.

    Every worker that has a part keeps it: only newcomers take parts that are missing. Those that were in one replica
    stay together if possible, and if there are too many for a part, those of incomplete replicas are over. Newcomers
    take places beside ranks of their own host along the inner axes.

    Args:
        shape: of a replica.
        candidates: workers, those to be preferred first.
        max_replicas: the most replicas.
    """
    holders: list[list[Candidate]] = [[] for _ in range(shape.size)]
    num_left = Counter(each.replica for each in candidates if each.part is not None)
    for each in sorted(candidates, key=lambda each: -num_left[each.replica]):
        if each.part is not None:
            holders[each.part].append(each)
    newcomers = [each for each in candidates if each.part is None]
    num = 0
    while num < max_replicas and sum(max(0, num + 1 - len(held)) for held in holders) <= len(newcomers):
        num += 1
    seats: dict[int, Candidate] = {}
    for part, held in enumerate(holders):
        _keep_together(shape, part, held[:num], num, seats)
    for rank in sorted(set(range(num * shape.size)) - set(seats)):
        hosts = [seats[other].host for other in _beside(shape, rank) if other in seats]
        chosen = next((each for each in newcomers if each.host in hosts), newcomers[0])
        newcomers.remove(chosen)
        seats[rank] = chosen
    seated = {each.worker for each in seats.values()}
    return Seating(
        workers=tuple(seats[rank].worker for rank in sorted(seats)),
        parts=tuple(shape.part(rank, num) for rank in sorted(seats)),
        num_replicas=num,
        over=tuple(each.worker for each in candidates if each.worker not in seated),
        vacant=tuple(part for part, held in enumerate(holders) if len(held) <= num),
    )


def _keep_together(
    shape: ReplicaShape, part: int, held: Sequence[Candidate], num_replicas: int, seats: dict[int, Candidate]
) -> None:
    """Seat those that have a part: in the replica that they were in if it is there and free, else in the next."""
    free = list(range(num_replicas))
    later = []
    for each in held:
        if each.replica in free:
            free.remove(each.replica)
            seats[shape.rank(part, each.replica, num_replicas)] = each
        else:
            later.append(each)
    for each, replica in zip(later, free, strict=False):
        seats[shape.rank(part, replica, num_replicas)] = each


def _beside(shape: ReplicaShape, rank: int) -> Iterable[int]:
    """Return the ranks of the same replica along the inner axes."""
    first = rank - rank % shape.inner
    return range(first, first + shape.inner)


__all__ = ["Candidate", "ReplicaShape", "Seating", "seat"]
