"""The operations of stage 3: leaves are gathered for a part of the program, and their gradients handed over early."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
from typing_extensions import override

from unidist.buffer import HOST, DType
from unidist_arrays.fused_exchange import FusedExchange
from unidist_arrays.memory import Array, array_of_buffer
from unidist_jax.compiled import HostOperation, ShapeDtype
from unidist_jax.optimizer import Cell, copy_array
from unidist_zero._jax.operations import GatherUpdates, PieceExchange, PieceOperation
from unidist_zero.sharding.gather_check import GatherCheck
from unidist_zero.sharding.partition import Piece

_FLAG = ShapeDtype((), np.dtype(bool))


class LeafExchange(PieceExchange):
    """Also gathers some leaves at a time, and orders the exchange of gradients.

    Args:
        fused: the exchange of the gradients, prepared.
    """

    def __init__(self, fused: FusedExchange) -> None:
        super().__init__(fused)
        self._shards = [
            [piece for piece in self._partition.pieces(rank) if piece.count]
            for rank in range(self._partition.num_shards)
        ]
        self.names: dict[int, str] = {}

    def bucket_order(self, places: Sequence[int]) -> list[int]:
        """Return the buckets in the order in which they are full, if gradients are complete in the order `places`."""
        when = {place: time for time, place in enumerate(places)}
        last = [max((when[slot.parameter] for slot in bucket.slots), default=0) for bucket in self._partition.buckets]
        return sorted(range(len(last)), key=last.__getitem__)

    def post_in_order(self, numbers: Sequence[int]) -> None:
        """See `ReduceScatterExchange.post_in_order`."""
        self._exchange.post_in_order(numbers)

    def shards_of(self, places: Sequence[int]) -> list[list[Piece]]:
        """Return the pieces of these leaves that each rank of the shard group has, in the order of their transfer."""
        wanted = frozenset(places)
        return [[piece for piece in shard if piece.parameter in wanted] for shard in self._shards]

    def gather_some(
        self, shards: Sequence[Sequence[Piece]], own: Mapping[int, Array], leaves: Mapping[int, Array]
    ) -> None:
        """Gather leaves of one type. Collective over the shard group.

        Args:
            shards: as `shards_of` gives them.
            own: the pieces of this rank, by place.
            leaves: whole leaves to write to, by place.
        """
        dtype = next(iter(leaves.values())).dtype
        counts = [sum(piece.count for piece in shard) for shard in shards]
        begin = sum(counts[: self._rank])
        pooled, memory = self._buffers.acquire(sum(counts) * dtype.itemsize)
        memory = memory.cast(DType(dtype.name))
        offset = begin
        for piece in shards[self._rank]:
            copy_array(array_of_buffer(memory.slice(offset, piece.count)), own[piece.parameter].reshape(-1))
            offset += piece.count
        communicator = self._groups[HOST].communicator
        if communicator.size > 1 and memory.count:
            mine = memory.slice(begin, counts[self._rank])
            work = communicator.allgather(mine, memory, counts=counts)
            self.fused.update.context.recorder.wait(work)
        offset = 0
        for shard in shards:
            for piece in shard:
                target = leaves[piece.parameter].reshape(-1)[piece.start : piece.start + piece.count]
                copy_array(target, array_of_buffer(memory.slice(offset, piece.count)))
                offset += piece.count
        self._buffers.release(pooled)

    def check(self, number: int) -> None:
        """Compare with the ranks of the shard group which leaves are gathered next. Collective over it."""
        communicator = self._groups[HOST].communicator
        if communicator.size > 1:
            check = GatherCheck(communicator, number, _PartNames(self.names))
            check.post()
            check.verify()


class _PartNames(dict[int, str]):
    """Names of what is gathered; other ranks may gather something that this one does not know."""

    def __missing__(self, number: int) -> str:
        return "other arrays"


class GatherLeaves(HostOperation):
    """Gathers some leaves: this rank's pieces of them and one number in, whole leaves out.

    The number is computed from what must be there before; it is not looked at.

    Args:
        cell: the exchange.
        places: of the leaves.
    """

    can_be_batched: ClassVar[bool] = False

    def __init__(self, cell: Cell[LeafExchange], places: Sequence[int]) -> None:
        self._cell = cell
        self._places = tuple(places)
        exchange = cell.value
        infos = exchange.fused.variables
        self._number = zlib.crc32(repr(self._places).encode()) & 0x7FFFFFFF
        exchange.names[self._number] = ", ".join(infos[place].name for place in self._places)
        kinds: dict[DType, list[int]] = {}
        for place in self._places:
            kinds.setdefault(infos[place].dtype, []).append(place)
        self._kinds = [(places, exchange.shards_of(places)) for places in kinds.values()]

    @property
    @override
    def title(self) -> str:
        return "the gathering of parameters with zero=3"

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        exchange = self._cell.value
        pieces = zip(self._places, operands, strict=False)  # without the number, which is the last operand
        return [ShapeDtype(exchange.pieces[place].shape, operand.dtype) for place, operand in pieces]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        exchange = self._cell.value
        own = dict(zip(self._places, operands, strict=False))
        leaves = dict(zip(self._places, results, strict=True))
        exchange.check(self._number)
        for places, shards in self._kinds:
            exchange.gather_some(shards, own, {place: leaves[place] for place in places})


class GatherWhole(GatherUpdates):
    """Gathers all leaves, bucket by bucket: this rank's pieces in, whole leaves out."""

    @property
    @override
    def title(self) -> str:
        return "the gathering of all parameters with zero=3"

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        self._cell.value.gather(operands, results)


class HandOver(PieceOperation):
    """Takes gradients of some leaves, whose exchange begins: nothing comes back but a flag.

    Args:
        cell: the exchange.
        places: of the leaves.
    """

    def __init__(self, cell: Cell[LeafExchange], places: Sequence[int]) -> None:
        super().__init__(cell)
        self._places = tuple(places)

    @property
    @override
    def title(self) -> str:
        return "the exchange of gradients with zero=3"

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return [_FLAG]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        self._cell.value.fused.take(dict(zip(self._places, operands, strict=True)))
        results[0][...] = True


class FinishPieces(PieceOperation):
    """Completes a pass whose gradients were handed over: returns whether that is an update, and this rank's pieces."""

    @property
    @override
    def title(self) -> str:
        return "the end of the exchange of gradients with zero=3"

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        exchange = self._cell.value
        pieces = zip(exchange.pieces, exchange.dtypes, strict=True)
        return [_FLAG, *(ShapeDtype(piece.own_shape, dtype) for piece, dtype in pieces)]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        exchange = self._cell.value
        flag, *targets = results
        outcome = exchange.fused.run({})
        flag[...] = outcome.complete
        if outcome.complete:
            exchange.copy_reduced(targets)
            exchange.fused.update.applied()
