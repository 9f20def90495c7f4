"""Plans copies of state that only one rank has, and the transfers that restore it after ranks were lost. Pure.

Every rank computes the same result from the same input. A *holding* is the part of the state that one rank, its
*origin*, had when the state was committed. A second rank, its *guard*, has a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from unidist.checkpoint.format.parts import Part, Run, runs
from unidist.checkpoint.format.writing import Identity

_ALIGNMENT_BYTES = 64

Wanted = tuple[str, str, Part]
"""Section, name of the tensor, and part of it that a rank is to have."""


@dataclass(frozen=True)
class Transfer:
    """Elements that one rank gives to one.

    Args:
        giver: the rank that has them.
        origin: of the holding that they are in.
        piece: position of the piece in the holding.
        taker: the rank that wants them, maybe the giver.
        wanted: position among what the taker wants.
        run: where in the piece (`source`) and in what is wanted (`target`).
        itemsize: bytes of an element.
    """

    giver: int
    origin: int
    piece: int
    taker: int
    wanted: int
    run: Run
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.run.count * self.itemsize


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


def transfers(
    holdings: Mapping[int, Sequence[Identity]], holders: Mapping[int, Sequence[int]], wants: Sequence[Sequence[Wanted]]
) -> list[Transfer]:
    """Choose the source of each transfer: a rank uses its own data first, and all ranks send about as much.

    Args:
        holdings: the pieces of each origin.
        holders: the ranks that have the holding of an origin; at least one.
        wants: what each rank wants, by rank.

    Returns:
        In the order of the receivers and their requests. Parts that no rank has are left out: see `missing`.
    """
    there: dict[tuple[str, str], list[tuple[int, int, Identity]]] = {}
    for origin in sorted(holdings):
        for position, identity in enumerate(holdings[origin]):
            there.setdefault((identity[0], identity[1].name), []).append((origin, position, identity))
    given = [0] * len(wants)
    found: list[Transfer] = []
    for taker, wanted in enumerate(wants):
        for number, (section, name, part) in enumerate(wanted):
            left = [(0, part.count)]
            candidates = there.get((section, name), [])
            for origin, position, (_, info, piece) in sorted(
                candidates, key=lambda each: taker not in holders[each[0]]
            ):
                if not left:
                    break
                taken, left = _cut(runs(part, piece), left)
                for run in taken:
                    giver = min(holders[origin], key=lambda rank: (rank != taker, given[rank], rank))
                    made = Transfer(giver, origin, position, taker, number, run, info.dtype.itemsize)
                    given[giver] += made.nbytes if giver != taker else 0
                    found.append(made)
    return found


def missing(wants: Sequence[Wanted], chosen: Iterable[Transfer]) -> list[Wanted]:
    """Return what a rank wants and does not get as a whole.

    Args:
        wants: of this rank.
        chosen: the transfers to it.
    """
    counts = [0] * len(wants)
    for each in chosen:
        counts[each.wanted] += each.run.count
    return [wanted for wanted, count in zip(wants, counts, strict=True) if count != wanted[2].count]


def _cut(found: Iterable[Run], left: Sequence[tuple[int, int]]) -> tuple[list[Run], list[tuple[int, int]]]:
    """Return what of the runs lies in the ranges `left` of the wanted part, and what is left of these afterwards."""
    taken: list[Run] = []
    for run in found:
        rest: list[tuple[int, int]] = []
        for start, stop in left:
            low, high = max(start, run.target), min(stop, run.target + run.count)
            if low >= high:
                rest.append((start, stop))
                continue
            taken.append(Run(low, run.source + low - run.target, high - low))
            rest += [each for each in ((start, low), (high, stop)) if each[0] < each[1]]
        left = rest
    return taken, list(left)
