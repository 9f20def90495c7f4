"""Committed state that is divided over the ranks: each share is in its rank's memory, with a copy on another rank.

A commit has two steps, so that at any time there is one that all ranks have. Every rank keeps its share and the copy of
its neighbour's, in addition to those of the previous commit. Only when all ranks have done so does any of them mark it
as committed. After a loss the new rank 0 decides from which commit all ranks continue: no rank has dropped a commit
that it has marked.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from unidist.buffer import Buffer, DType, copy
from unidist.checkpoint.agreement import agree
from unidist.checkpoint.format.interface import KeepsState
from unidist.checkpoint.format.reader import Convert
from unidist.checkpoint.saving import plain
from unidist.communicator import Communicator
from unidist.control.elastic.replicas import ReplicaShape
from unidist.elastic.peer.loading import HeldPieces, HoldingIndex, take_over
from unidist.elastic.peer.transfers import guards, lost_origins, places, twins
from unidist.engines.single import SingleCommunicator
from unidist.errors import StateLostError
from unidist.mesh import DATA_AXIS
from unidist.negotiation.objects import gather_objects
from unidist.negotiation.pickles import seal, unseal

if TYPE_CHECKING:
    from unidist.runtime.context import Context

Key = tuple[int, int, int]
"""Identifies a commit: generation (-1: of a rank that is alone), worker (-1: of all), number in the generation."""

_COMMIT = "the state cannot be committed"


@dataclass
class _Commit:
    """This rank's part of one commit.

    Args:
        key: of the commit.
        keepers: for each participating rank, the rank that has a copy of its holding, see `guards`.
        same: for each of them the others that hold the same, see `twins`.
        holdings: on this rank, by the rank whose state it is.
        memories: of the holdings.
    """

    key: Key
    keepers: list[int | None]
    same: list[tuple[int, ...]]
    holdings: dict[int, HeldPieces] = field(default_factory=dict)
    memories: list[Buffer] = field(default_factory=list)


@dataclass(frozen=True)
class Peers:
    """The world in which a commit is made.

    Args:
        communicator: over all ranks, a separate one for each context.
        generation: of the elastic job; -1 for a rank that is still alone, and in jobs that are not elastic: then each
            rank keeps only its own share, without copies.
        worker: number of this process in the job.
        host: number of its host.
        leaving: workers that will not be in the next generation.
        part: of the model that this rank holds; ranks with equal parts hold the same, if it is not sharded over them.
            None: the model is not divided.
        replica: of a divided model that this rank belongs to.
    """

    communicator: Communicator
    generation: int = -1
    worker: int = 0
    host: int = 0
    leaving: frozenset[int] = frozenset()
    part: int | None = None
    replica: int = 0

    @property
    def keep_copies(self) -> bool:
        """Whether each rank keeps a copy of another rank's share."""
        return self.generation >= 0 and self.communicator.size > 1


class PeerMemory:
    """Keeps commits of values that are divided over the ranks. Every rank calls the same methods in the same order.

    Args:
        convert: converts types, see `Framework.convert`.
    """

    def __init__(self, convert: Convert | None = None) -> None:
        self._convert = convert
        self._commits: list[_Commit] = []
        self._committed: Key | None = None
        self._number = 0
        self._spare: list[Buffer] = []
        self._communicator: Communicator | None = None

    def commit(self, peers: Peers, states: Mapping[str, KeepsState], *, is_sharded: bool = True) -> None:
        """Keep the present state, and the previous commit. Collective in a world of an elastic job.

        Args:
            peers: the present world.
            states: of the values, by section.
            is_sharded: no other rank has what this one has; else those with the same part of the model have it, too.

        Raises:
            UnidistError: it cannot be kept, on this or another rank.
        """
        if self._communicator is not peers.communicator:
            self._number = 0
        self._number += 1
        self.drop_older()
        communicator = peers.communicator
        key = (peers.generation, -1 if peers.generation >= 0 else peers.worker, self._number)
        made = _Commit(key, [None] * communicator.size, [()] * communicator.size)
        own: HeldPieces | None = None
        error: Exception | None = None
        try:
            own = self._packed(states, made)
        except Exception as exc:  # of whatever kind: the others must hear of it
            error = exc
        if peers.keep_copies:
            self._exchange(peers, made, own, error, part=None if is_sharded else peers.part)
        elif error is not None:
            raise error
        assert own is not None
        made.holdings[communicator.rank] = own
        self._commits.append(made)
        if peers.keep_copies:
            communicator.barrier().wait()  # all ranks have what they are to keep
        self._committed, self._communicator = key, communicator

    @property
    def committed(self) -> Key | None:
        """The last commit that this rank has marked."""
        return self._committed

    def drop_older(self) -> None:
        """Keep the last commit only."""
        for old in [commit for commit in self._commits if commit.key != self._committed]:
            self._commits.remove(old)
            self._spare = old.memories

    def restore(self, states: Mapping[str, KeepsState]) -> None:
        """Bring back this rank's share of the last commit, if that was made in the present world."""
        commit = self._find(self._committed)
        assert commit is not None, "there is a commit"
        assert self._communicator is not None
        rank = self._communicator.rank
        own = {rank: commit.holdings[rank]}
        take_over(SingleCommunicator(), own, {rank: [0]}, own, states, convert=self._convert, is_whole=False)

    def load(self, peers: Peers, states: Mapping[str, KeepsState]) -> Key | None:
        """Load the last commit from the ranks that have its pieces. Collective.

        That is the last one that any rank has marked as such: then all ranks of its generation have it. Of ranks that
        have all been alone until now, it is that of rank 0.

        Args:
            peers: the present world.
            states: of the values, which are divided for the present number of ranks.

        Returns:
            The commit, if this rank had a part in it.

        Raises:
            StateLostError: a lost rank held the only copy of something.
        """
        communicator = peers.communicator
        keys: list[Key | None] = gather_objects(communicator, self._committed)
        latest = max(key for key in keys if key is not None)
        commit = self._find(latest if latest[0] >= 0 else keys[0])
        gathered: list[_CommitContents | None] = gather_objects(
            communicator, None if commit is None else _CommitContents.of(commit)
        )
        first = next(each for each in gathered if each is not None)
        contents = [_CommitContents(first.keepers, first.same, {}) if each is None else each for each in gathered]
        lost = lost_origins([each.holdings for each in contents], first.same)
        if lost:
            raise StateLostError(_lost_text(lost, first))
        holdings = {origin: held for each in reversed(contents) for origin, held in each.holdings.items()}
        holders = {
            origin: [rank for rank, each in enumerate(contents) if origin in each.holdings] for origin in holdings
        }
        own = {} if commit is None else commit.holdings
        take_over(communicator, holdings, holders, own, states, convert=self._convert)
        if commit is not None:
            self._commits, self._committed = [commit], commit.key
            return commit.key
        return None

    def _find(self, key: Key | None) -> _Commit | None:
        return next((commit for commit in self._commits if commit.key == key), None)

    # Keeping

    def _packed(self, states: Mapping[str, KeepsState], commit: _Commit) -> HeldPieces:
        values = {name: plain(state.values(), name) for name, state in states.items()}
        held = [
            (name, piece)
            for name, state in states.items()
            for piece in state.pieces()
            if piece.part.count or not piece.tensor.count
        ]
        identities = tuple((name, piece.tensor, piece.part) for name, piece in held)
        offsets, nbytes = places(identities)
        memory = self._memory(nbytes, commit)
        for offset, (_, piece) in zip(offsets, held, strict=True):
            copy(piece.memory, memory.slice(offset, piece.nbytes))
        return HeldPieces(identities, values, memory)

    def _exchange(
        self, peers: Peers, commit: _Commit, own: HeldPieces | None, error: Exception | None, *, part: int | None
    ) -> None:
        """Give this rank's holding to its guard, unless others have the same, and take those that it guards."""
        communicator = peers.communicator
        header = bytearray() if own is None else seal((own.pieces, own.values), _COMMIT)
        place = _Place(peers.worker, tuple(peers.leaving), peers.host, part, peers.replica)
        sizes = (len(header), 0 if own is None else own.memory.nbytes)
        told: list[tuple[_Place, tuple[int, int]]] = agree(communicator, (place, sizes), error, _COMMIT)
        assert own is not None
        ranks = [each for each, _ in told]
        workers = {worker for each in ranks for worker in each.leaving}
        leaving = [rank for rank, each in enumerate(ranks) if each.worker in workers]
        commit.same = twins([each.part for each in ranks], leaving)
        replicas = None if peers.part is None else [each.replica for each in ranks]
        guarding = guards([each.host for each in ranks], leaving, replicas)
        keepers = [None if same else guard for same, guard in zip(commit.same, guarding, strict=True)]
        commit.keepers = keepers
        guarded = [origin for origin, keeper in enumerate(keepers) if keeper == communicator.rank]
        headers = Buffer.allocate(sum(told[origin][1][0] for origin in guarded), DType.UINT8)
        self._send(communicator, keepers, Buffer.of(header), headers, [size[0] for _, size in told])
        memory = self._memory(sum(told[origin][1][1] for origin in guarded), commit)
        self._send(communicator, keepers, own.memory, memory, [size[1] for _, size in told])
        at_header = at_memory = 0
        for origin in guarded:
            header_bytes, nbytes = told[origin][1]
            pieces, values = unseal(headers.slice(at_header, header_bytes).bytes(), _COMMIT)
            commit.holdings[origin] = HeldPieces(pieces, values, memory.slice(at_memory, nbytes))
            at_header, at_memory = at_header + header_bytes, at_memory + nbytes

    def _send(
        self,
        communicator: Communicator,
        keepers: Sequence[int | None],
        source: Buffer,
        target: Buffer,
        sizes: Sequence[int],
    ) -> None:
        rank = communicator.rank
        kept = keepers[rank] is not None
        communicator.alltoall(
            source if kept else source.slice(0, 0),
            target,
            send_counts=[source.nbytes if each == keepers[rank] else 0 for each in range(communicator.size)],
            receive_counts=[size if keeper == rank else 0 for keeper, size in zip(keepers, sizes, strict=True)],
        ).wait()

    def _memory(self, nbytes: int, commit: _Commit) -> Buffer:
        """Return memory of this size, of a commit that was dropped where it fits: new pages cost ten times the copy."""
        found = next((each for each in self._spare if each.nbytes == nbytes), None)
        if found is not None:
            self._spare = [each for each in self._spare if each is not found]
        else:
            pages = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            found = Buffer.of(pages).slice(0, nbytes)
        commit.memories.append(found)
        return found


class _Place(NamedTuple):
    """State that a rank reports to the others at a commit, see `Peers`; `part` is None if its state is sharded."""

    worker: int
    leaving: tuple[int, ...]
    host: int
    part: int | None
    replica: int


@dataclass(frozen=True)
class _CommitContents:
    """A rank's part of the commit from which all ranks continue.

    Args:
        keepers: the ranks that had copies, see `_Commit`.
        same: the ranks that held the same, see there.
        holdings: index of each holding that it has, by origin.
    """

    keepers: list[int | None]
    same: list[tuple[int, ...]]
    holdings: dict[int, HoldingIndex]

    @classmethod
    def of(cls, commit: _Commit) -> _CommitContents:
        held = {origin: HoldingIndex(each.pieces, each.values) for origin, each in commit.holdings.items()}
        return cls(commit.keepers, commit.same, held)


class _Link:
    """The communicator by which shares travel; one for each generation."""

    def __init__(self, runtime: Context) -> None:
        self.communicator = runtime.duplicate_world()

    def close(self) -> None:
        """Give it back."""
        self.communicator.close()


def peers_of(runtime: Context) -> Peers:
    """Return the world of a context. Collective when first asked for."""
    communicator, membership = runtime.owned(_Link).communicator, runtime.membership
    if membership is None:
        return Peers(communicator)
    link, mesh, rank = membership.link, runtime.mesh, runtime.topology.rank
    shape = ReplicaShape.of(mesh)
    return Peers(
        communicator,
        membership.generation,
        link.worker,
        runtime.topology.node_rank,
        frozenset(link.leaving_workers),
        shape.part(rank, mesh.size(DATA_AXIS)) if shape.size > 1 else None,
        shape.replica(rank, mesh.size(DATA_AXIS)),
    )


def _lost_text(lost: Sequence[int], commit: _CommitContents) -> str:
    others = {rank: commit.same[rank] or [commit.keepers[rank]] for rank in lost}
    copies = ", ".join(f"of rank {rank} by rank {' and '.join(map(str, held))}" for rank, held in others.items())
    return (
        f"the last commit of {len(commit.keepers)} ranks cannot be brought together: ranks were lost at once that kept "
        f"a share of the state and its only copy (the share {copies}). A share survives the loss of one rank, or of "
        "one host where there are several. With --checkpoint-dir a job goes on from its latest checkpoint then"
    )
