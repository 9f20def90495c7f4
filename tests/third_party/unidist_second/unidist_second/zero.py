"""unidist's strategy `zero` for numpy: stages 1 and 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from unidist.buffer import Buffer
from unidist.checkpoint.format import Part
from unidist.errors import ConfigurationError
from unidist_arrays.memory import array_of_buffer
from unidist_second.binding import NumpyInnerStep
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
        self._made_for: ReduceScatterExchange | None = None

    @property
    def _exchange(self) -> ReduceScatterExchange:
        """The exchange of this generation, whose partition says which pieces are this rank's."""
        (exchange,) = self._update.exchanges
        assert isinstance(exchange, ReduceScatterExchange)
        return exchange

    def velocities(self, *, make: bool) -> list[tuple[str, Part, Array]]:
        """See `NumpyInnerStep.velocities`."""
        exchange, parameters = self._exchange, list(self._optimizer.parameters.items())
        if make:
            own = (exchange.shard_groups[bucket.memory].communicator.rank for bucket in exchange.partition.buckets)
            mine = {piece for rank in set(own) for piece in exchange.partition.pieces(rank) if piece.count}
            self._velocities = {each: np.zeros(each.count, parameters[each.parameter][1].dtype) for each in mine}
        found = []
        for piece, velocity in self._velocities.items():
            name, parameter = parameters[piece.parameter]
            found.append((name, Part.flat(parameter.shape, piece.start, piece.start + piece.count), velocity))
        return found

    def step(self, present: Sequence[bool]) -> None:
        """Update this rank's pieces; then bring every parameter up to date."""
        exchange = self._exchange
        partition = exchange.partition
        if self._made_for is not exchange:
            self._memory = [exchange.allocate(bucket.count, bucket) for bucket in partition.buckets]
            self._gather = ShardGather(partition, self._memory, exchange.shard_groups)
            self._made_for = exchange
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
    return array_of_buffer(memory.slice(offset, piece.count))
