"""Plans copies of state that only one rank has. Pure.

Every rank computes the same result from the same input. A *holding* is the part of the state that one rank, its
*origin*, had when the state was committed. A second rank, its *guard*, has a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from unidist.checkpoint.format.writing import Identity

_ALIGNMENT_BYTES = 64


def guards(
    hosts: Sequence[int], leaving: Collection[int] = (), replicas: Sequence[int] | None = None
) -> list[int | None]:
    """Return for each rank which other one keeps a copy of what it has: on another host, where there is one.

    So that one lost rank, or one lost host, loses nothing.

    Args:
        hosts: number of each rank's host.
        leaving: ranks that will not be there soon: they keep no copies, unless all of them are.
        replicas: of the model that each rank belongs to, if the model is divided. Then copies are on another replica,
            where there is one, and on another host of that if possible: without a lost rank all of its replica stand
            by. None: the model is not divided.

    Returns:
        For each rank another one; None where there is no other.
    """
    staying = [rank for rank in range(len(hosts)) if rank not in leaving] or list(range(len(hosts)))
    if replicas is None or len({replicas[rank] for rank in staying}) == 1:
        return [_guard(rank, hosts, staying) for rank in range(len(hosts))]
    num_kept = dict.fromkeys(staying, 0)
    found: list[int | None] = []
    for rank, replica in enumerate(replicas):
        elsewhere = [each for each in staying if replicas[each] != replica]
        far = [each for each in elsewhere if hosts[each] != hosts[rank]] or elsewhere
        keeper = min(far, key=lambda each: (num_kept[each], each))
        num_kept[keeper] += 1
        found.append(keeper)
    return found


def _guard(rank: int, hosts: Sequence[int], staying: Sequence[int]) -> int | None:
    numbers = sorted(set(hosts))
    own = numbers.index(hosts[rank])
    position = [each for each in range(len(hosts)) if hosts[each] == hosts[rank]].index(rank)
    for host in numbers[own + 1 :] + numbers[:own]:
        there = [each for each in staying if hosts[each] == host]
        if there:
            return there[position % len(there)]
    others = [each for each in staying if each != rank]
    return next((each for each in others if each > rank), others[0]) if others else None


def twins(parts: Sequence[int | None], leaving: Collection[int] = ()) -> list[tuple[int, ...]]:
    """Return for each rank the others that hold the same state, and will still be there: they need no copy of it.

    Args:
        parts: of the model, by rank: ranks with equal parts hold the same; None: no other rank holds the same.
        leaving: ranks that will not be there soon.
    """
    return [
        tuple(
            other
            for other, its_part in enumerate(parts)
            if part is not None and its_part == part and other != rank and other not in leaving
        )
        for rank, part in enumerate(parts)
    ]


def lost_origins(held: Iterable[Collection[int]], same: Sequence[Collection[int]]) -> list[int]:
    """Return the ranks of the generation that has committed whose holdings no rank has any more.

    Args:
        held: by rank of today, the origins of the holdings that it has.
        same: for each rank of that generation the others that held the same, see `twins`.
    """
    there = set[int]().union(*held)
    return [origin for origin, others in enumerate(same) if not there & {origin, *others}]


def places(pieces: Sequence[Identity]) -> tuple[list[int], int]:
    """Return the byte offsets of the pieces of a holding in its memory, and its size."""
    offsets, end = [], 0
    for _, info, part in pieces:
        offsets.append(end)
        end += -(-part.count * info.dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return offsets, end
