"""Values that several ranks hold must be equal: each rank's digests of them, compared.

What a rank holds are the pieces that it would put into a checkpoint, so it is known of every strategy which of them
are copies of another rank's.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from unidist.buffer import Buffer
from unidist.checkpoint.format.pieces import Piece
from unidist.communicator import ReduceOp, format_ranks
from unidist.errors import MismatchError
from unidist.negotiation import OperationKind, Request, allgather_object
from unidist.optim.interface import ChecksBeforeSave
from unidist.runtime import context
from unidist.strategy.interface import Plan

if TYPE_CHECKING:
    from unidist.runtime.context import Context

_log = logging.getLogger("unidist")

FIRST_UPDATES = (1, 2, 10)
"""Updates after which `--verify first` compares."""
_SAMPLE_BYTES = 64 << 20
"""With `--verify first` so many bytes are read, the first ones of each piece."""
_DIGEST_BYTES = 8

Pieces = Callable[[], Sequence[Piece]]
"""Returns the pieces of the trained parameters that this rank holds."""


class ReplicaCheck(ChecksBeforeSave):
    """Compares the values of one model over the ranks. Follows the updates of its optimizer.

    Args:
        runtime: whose ranks; in an elastic job those of each generation.
        pieces: see `Pieces`.
        divided: ranks may hold different parameters, or parts of them.
        every: compare after each so many updates; 0: after `FIRST_UPDATES` alone.
        warns: warn of a difference, once, instead of raising: Horovod trains ranks that began differently.
        more: returns digests of 8 bytes of what else is equal on all ranks, by name.
    """

    name = "verify"

    def __init__(
        self,
        runtime: Context,
        pieces: Pieces,
        *,
        divided: bool,
        every: int,
        warns: bool = False,
        more: Callable[[], Mapping[str, bytes]] = dict,
    ) -> None:
        self._runtime = runtime
        self._pieces = pieces
        self._more = more
        self._divided = divided
        self._every = every
        self._warns = warns
        self._has_warned = False
        self._num_updates = 0  # since the model was distributed, or the generation began

    def on_step(self, step: int) -> None:
        """Compare, if it is time to. Collective over all ranks.

        Args:
            step: number of the update, from 1, the same on every rank.

        Raises:
            MismatchError: see `compare`.
        """
        if self._runtime.is_elastic and context.is_initialized() and not context.is_current(self._runtime):
            self._runtime, self._num_updates = context.current(), 0  # all ranks begin this generation at one update
        self._num_updates += 1
        if self.is_due(self._num_updates):
            self.compare(f"after update {step}")

    def is_due(self, number: int) -> bool:
        """Return whether to compare after so many updates."""
        return number in FIRST_UPDATES or (self._every > 0 and number % self._every == 0)

    @override
    def before_save(self) -> None:
        self.compare("at the checkpoint")

    def state(self) -> dict[str, Any]:
        """Return nothing: a checkpoint keeps no checks."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Do nothing."""

    def compare(self, moment: str) -> None:
        """Compare now: every byte with `--verify every=N`, else the first of each piece. Collective over all ranks.

        Args:
            moment: for the message.

        Raises:
            MismatchError: on every rank; names the first parameter that differs.
        """
        if self._has_warned or not context.is_current(self._runtime):
            return  # another job has begun; its strategies say what becomes of an optimizer of the last one
        own = {**digests(self._pieces(), whole=self._every > 0), **self._more()}
        differing = self._gathered(own) if self._divided else self._reduced(own)
        if differing:
            name, ranks = differing[0]
            more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
            where = f" on ranks {format_ranks(ranks)}" if ranks else ""
            text = (
                f"{moment}, {name} is not the same{where}, though these ranks hold copies of it{more} (seen on rank "
                f"{self._runtime.topology.rank}). Something changed it on one rank alone: an operation on gradients "
                "that knows only this rank's part, code that runs on one rank, or a compressor that gives the ranks "
                "different bits. --verify off turns this check off."
            )
            if not self._warns:
                raise MismatchError(text)
            self._has_warned = True  # on all ranks
            if self._runtime.topology.rank == 0:
                _log.warning("%s Or they began with different values: call broadcast_parameters before training.", text)

    def _reduced(self, held: dict[str, bytes]) -> list[tuple[str, Sequence[int]]]:
        """Compare where every rank holds the same parameters; ranks that have joined take part with zeros."""
        names = list(held)
        own = b"".join(held.values())
        data = bytearray(own + bytes(255 - byte for byte in own))
        if not data:
            return []
        buffer = Buffer.of(data)
        request = Request("verify values", OperationKind.ALLREDUCE, buffer, buffer, (len(data),), ReduceOp.MAX)
        self._runtime.operations().submit(request).wait()
        largest, smallest = data[: len(own)], bytes(255 - byte for byte in data[len(own) :])
        return [
            (name, ())
            for index, name in enumerate(names)
            if largest[(span := slice(index * _DIGEST_BYTES, (index + 1) * _DIGEST_BYTES))] != smallest[span]
        ]

    def _gathered(self, held: dict[str, bytes]) -> list[tuple[str, Sequence[int]]]:
        """Compare where ranks hold different parameters."""
        everyone: list[dict[str, bytes]] = allgather_object(self._runtime.operations(), held, name="verify values")
        first: dict[str, bytes] = {}
        differing: dict[str, set[int]] = {}
        for rank, theirs in enumerate(everyone):
            for name, digest in theirs.items():
                if first.setdefault(name, digest) != digest:
                    differing.setdefault(name, set()).add(rank)
        holders = {name: [rank for rank, theirs in enumerate(everyone) if name in theirs] for name in differing}
        return [(name, holders[name]) for name in differing]


class CheckpointCheck(ChecksBeforeSave):
    """Compares when a checkpoint begins. Follows the updates of an optimizer in whose steps no value is at rest.

    Args:
        check: what compares.
    """

    name = "verify"

    def __init__(self, check: ReplicaCheck) -> None:
        self._check = check

    def on_step(self, step: int) -> None:
        """Do nothing."""

    @override
    def before_save(self) -> None:
        self._check.before_save()

    def state(self) -> dict[str, Any]:
        """Return nothing: a checkpoint keeps no checks."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Do nothing."""


def replica_check(
    runtime: Context,
    plan: Plan,
    pieces: Pieces,
    *,
    warns: bool = False,
    in_generations: bool = False,
    holds_parts: bool = False,
    more: Callable[[], Mapping[str, bytes]] = dict,
) -> ReplicaCheck | None:
    """Return the comparison of the parameters that several ranks hold; None if there is none to be made.

    Args:
        runtime: whose ranks.
        plan: of the run.
        pieces: see `Pieces`.
        warns: see `ReplicaCheck`.
        in_generations: in an elastic job, too, whose updates are followed by the same object in each generation.
        holds_parts: ranks may hold different parameters where the strategies leave the model whole, too.
        more: see `ReplicaCheck`.
    """
    verify = runtime.settings.verify
    may_differ = not all(strategy.keeps_replicas for strategy in plan.strategies)
    is_alone = runtime.topology.world_size == 1 and not runtime.is_elastic  # there others join
    if not verify.first or may_differ or is_alone or (runtime.is_elastic and not in_generations):
        return None

    divided = holds_parts or bool(plan.model_axes) or any(strategy.changes_model for strategy in plan.strategies)
    return ReplicaCheck(runtime, pieces, divided=divided, every=verify.every, warns=warns, more=more)


def digests(pieces: Sequence[Piece], *, whole: bool = False) -> dict[str, bytes]:
    """Return a digest of each piece, by a name that is the same for the same piece on every rank.

    Args:
        pieces: in host memory, or copied there.
        whole: read every byte, else the first ones of each piece where there are many.
    """
    total = sum(piece.nbytes for piece in pieces)
    share = 1.0 if whole or total <= _SAMPLE_BYTES else _SAMPLE_BYTES / total
    return {_key(piece): _digest(piece, share) for piece in pieces}


def _key(piece: Piece) -> str:
    """Return a name that is the same for the same piece on every rank."""
    part, shape = piece.part, piece.tensor.shape
    name = f"parameter {piece.tensor.name!r}"
    is_whole = not part.more and part.box == tuple((0, size) for size in shape) and part.count == _count(shape)
    return name if is_whole else f"{name} at {part.boxes}[{part.start}:{part.stop}]"


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _digest(piece: Piece, share: float) -> bytes:
    memory = piece.memory  # a copy is there for as long as this refers to it
    data = memory.bytes()
    length = len(data) if share >= 1 else max(min(len(data), 4096), int(len(data) * share))
    check = zlib.crc32(data[:length])
    return hashlib.blake2b(b"%d %d" % (check, length), digest_size=_DIGEST_BYTES).digest()


__all__ = ["CheckpointCheck", "FIRST_UPDATES", "Pieces", "ReplicaCheck", "digests", "replica_check"]
