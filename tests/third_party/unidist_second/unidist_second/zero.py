"""unidist's strategy `zero` for numpy: stages 1 and 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from unidist.buffer import Buffer
from unidist.errors import ConfigurationError
from unidist_second.binding import NumpyInnerStep
from unidist_second.framework import array_of
from unidist_zero import ZeroBinding
from unidist_zero.sharding import Piece, ReduceScatterExchange, ShardGather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unidist.optim import MakesInnerStep, Update
    from unidist_second.models import SGD, Model
    from unidist_zero import Zero

Array = npt.NDArray[Any]


class NumpyZero(ZeroBinding):
    """See `ZeroBinding`."""

    unsupported = ("offload", "units", "prefetch", "shared")

    def inner_step(self, strategy: Zero) -> MakesInnerStep:
        """Return the class of the inner step; SGD looks at single elements, so parameters may be cut anywhere."""
        if strategy.stage == 3:
            raise ConfigurationError("zero=3 does not work with numpy, whose models hold whole arrays; use zero=2")
        return PiecesStep

    def attach(self, strategy: Zero, model: Model, update: Update) -> None:
        """Not called: that is for stage 3."""


class PiecesStep(NumpyInnerStep):
    """Each rank updates its pieces of the parameters, and gathers those of the others.

    Args:
        optimizer: the bound optimizer.
        plain: its class.
        update: the framework-free side.
    """

    sharded = True

    def __init__(self, optimizer: SGD, plain: type[SGD], update: Update) -> None:
        self._optimizer, self._update = optimizer, update
        self._velocities: dict[Piece, Array] = {}
        self._gather: ShardGather | None = None

    def step(self, present: Sequence[bool]) -> None:
        """Update this rank's pieces; then bring every parameter up to date."""
        (exchange,) = self._update.exchanges
        assert isinstance(exchange, ReduceScatterExchange)
        partition = exchange.partition
        if self._gather is None:
            self._memory = [exchange.allocate(bucket.count, bucket) for bucket in partition.buckets]
            self._gather = ShardGather(partition, self._memory, exchange.shard_groups)
        flat = [parameter.reshape(-1) for parameter in self._optimizer.parameters.values()]
        for number, bucket in enumerate(partition.buckets):
            rank = exchange.shard_groups[bucket.memory].communicator.rank
            own = self._gather.own(number)
            for piece in partition.pieces(rank):
                if piece.bucket != number or not piece.count:
                    continue
                begin = piece.offset - bucket.begin(rank)
                values = flat[piece.parameter][piece.start : piece.start + piece.count]
                if present[piece.parameter]:
                    gradient = _part(exchange.shard(number), begin, piece) * values.dtype.type(exchange.pending_factor)
                    velocity = self._velocities.setdefault(piece, np.zeros_like(values))
                    self._optimizer.update(values, velocity, gradient)
                _part(own, begin, piece)[:] = values
        self._gather.all()
        for piece in partition.all_pieces():
            flat[piece.parameter][piece.start : piece.start + piece.count] = _part(
                self._memory[piece.bucket], piece.offset, piece
            )


def _part(memory: Buffer, offset: int, piece: Piece) -> Array:
    return array_of(memory.slice(offset, piece.count))
