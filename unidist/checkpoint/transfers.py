"""Which rank gives which pieces of a state to which other one, and their exchange.

`transfers` is pure: every rank computes the same result from the same input. `move` carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from unidist.buffer import Buffer, DType
from unidist.checkpoint.format.parts import Part, Run, overlap, runs
from unidist.checkpoint.format.writing import Identity
from unidist.communicator import Communicator

Wanted = tuple[str, str, Part]
"""Section, name of the tensor, and part of it that a rank is to have."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """The elements that a piece and a wanted part have in common, given by one rank to one.

    Args:
        giver: the rank that has the piece.
        piece: which one.
        taker: the rank that wants the part, maybe the giver.
        wanted: the part.
    """

    giver: int
    piece: Identity
    taker: int
    wanted: Wanted

    def runs(self) -> list[Run]:
        """Return the elements: where they lie in the piece (`source`) and in what is wanted (`target`)."""
        return list(runs(self.wanted[2], self.piece[2]))

    @property
    def is_all(self) -> bool:
        """Return whether the piece is what is wanted, no more and no less."""
        return self.wanted[2] == self.piece[2]

    @property
    def max_nbytes(self) -> int:
        """Limit to the size in bytes. The size itself takes as long as the runs."""
        return min(self.wanted[2].count, self.piece[2].count) * self.piece[1].dtype.itemsize


def transfers(holders: Mapping[Identity, Collection[int]], wants: Sequence[Sequence[Wanted]]) -> list[Transfer]:
    """Choose the source of each transfer: a rank uses its own data first, and all ranks send about as much.

    Args:
        holders: the ranks that have each piece, at least one; in the same order on every rank. Pieces of a tensor are
            disjoint.
        wants: what each rank wants, by rank.

    Returns:
        In the order of the takers and their wants. Parts that no rank has are left out: see `missing`.
    """
    there: dict[tuple[str, str], list[Identity]] = {}
    for identity in holders:
        there.setdefault((identity[0], identity[1].name), []).append(identity)
    given = [0] * len(wants)
    found: list[Transfer] = []
    for taker, wanted in enumerate(wants):
        for each in wanted:
            for identity in there.get(each[:2], ()):
                if next(runs(each[2], identity[2]), None) is None:
                    continue
                giver = min(holders[identity], key=lambda rank: (rank != taker, given[rank], rank))
                found.append(Transfer(giver, identity, taker, each))
                given[giver] += found[-1].max_nbytes if giver != taker else 0
    return found


def missing(wants: Sequence[Wanted], chosen: Iterable[Transfer]) -> list[Wanted]:
    """Return what a rank wants and does not get as a whole.

    Args:
        wants: of this rank.
        chosen: the transfers to it.
    """
    counts = dict.fromkeys(wants, 0)
    for each in chosen:
        counts[each.wanted] += overlap(each.wanted[2], each.piece[2])
    return [wanted for wanted, count in counts.items() if count < wanted[2].count]


def move(
    communicator: Communicator,
    chosen: Sequence[Transfer],
    memory_of: Callable[[Identity], Buffer],
    targets: Mapping[Wanted, Buffer],
) -> None:
    """Move what was chosen. Collective, with the same transfers on every rank.

    Args:
        communicator: over all ranks.
        chosen: the transfers.
        memory_of: host memory of a piece that this rank gives.
        targets: host memory for what this rank takes, of the pieces' types.
    """
    rank, size = communicator.rank, communicator.size
    if any(each.giver != each.taker for each in chosen):
        outgoing: list[list[_Runs]] = [[] for _ in range(size)]
        incoming: list[list[_Runs]] = [[] for _ in range(size)]
        for each in chosen:
            if each.giver == rank != each.taker:
                outgoing[each.taker].append(_Runs.of(each))
            elif each.taker == rank != each.giver:
                incoming[each.giver].append(_Runs.of(each))
        send_counts, receive_counts = (
            [sum(each.nbytes for each in row) for row in rows] for rows in (outgoing, incoming)
        )
        source, target = (Buffer.allocate(sum(counts), DType.UINT8) for counts in (send_counts, receive_counts))
        start = 0
        for given in (given for row in outgoing for given in row):
            start = given.pack(memory_of(given.transfer.piece), source.bytes(), start)
        communicator.alltoall(source, target, send_counts=send_counts, receive_counts=receive_counts).wait()
        start = 0
        for taken in (taken for row in incoming for taken in row):
            start = taken.unpack(target.bytes(), start, targets[taken.transfer.wanted])
    for each in chosen:
        if each.giver == each.taker == rank:
            _Runs.of(each).copy(memory_of(each.piece), targets[each.wanted])


@dataclass(frozen=True, slots=True)
class _Runs:
    """The elements of a transfer, in bytes: `(source, target, count)` of each run.

    Views of memory are sliced: a matrix that is cut along its columns has a run for each row.
    """

    transfer: Transfer
    runs: list[tuple[int, int, int]]
    nbytes: int

    @classmethod
    def of(cls, transfer: Transfer) -> _Runs:
        item = transfer.piece[1].dtype.itemsize
        found = [(run.source * item, run.target * item, run.count * item) for run in transfer.runs()]
        return cls(transfer, found, sum(nbytes for _, _, nbytes in found))

    def pack(self, piece: Buffer, packed: memoryview, start: int) -> int:
        """Copy them from a piece, one behind the other; return the end."""
        view = piece.bytes()
        for source, _, nbytes in self.runs:
            packed[start : start + nbytes] = view[source : source + nbytes]
            start += nbytes
        return start

    def unpack(self, packed: memoryview, start: int, wanted: Buffer) -> int:
        """Copy them from where `pack` has put them; return the end."""
        view = wanted.bytes()
        for _, target, nbytes in self.runs:
            view[target : target + nbytes] = packed[start : start + nbytes]
            start += nbytes
        return start

    def copy(self, piece: Buffer, wanted: Buffer) -> None:
        """Copy them from a piece to what is wanted."""
        source, target = piece.bytes(), wanted.bytes()
        for begin, there, nbytes in self.runs:
            target[there : there + nbytes] = source[begin : begin + nbytes]
