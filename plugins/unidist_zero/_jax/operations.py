"""The exchange of pieces as operations that compiled programs call: one reduces gradients, one gathers updates."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from unidist.buffer import HOST, Buffer, DType
from unidist.gradients.precision import is_narrow
from unidist_arrays.fused_exchange import FusedExchange
from unidist_arrays.memory import NUMPY_DTYPES, Array, array_of_buffer, empty_array
from unidist_jax.compiled import HostOperation, ShapeDtype
from unidist_jax.optimizer import Cell, LeafPiece, copy_array
from unidist_zero._jax.pieces import pieces_of_rank
from unidist_zero.sharding.all_gather import ShardGather
from unidist_zero.sharding.bucket_buffers import BucketBuffers
from unidist_zero.sharding.partition import Piece
from unidist_zero.sharding.reduce_scatter import ReduceScatterExchange

_FLAG = ShapeDtype((), np.dtype(bool))


class PieceExchange:
    """Exchanges the pieces of one optimizer, on the host.

    Args:
        fused: the exchange of its gradients, prepared.

    Attributes:
        fused: that.
        pieces: of this rank, by place.
        dtypes: in which pieces are updated, by place: float32 for gradients of 16 bits, with the strategy `precision`.
    """

    def __init__(self, fused: FusedExchange) -> None:
        self.fused = fused
        (exchange,) = fused.update.exchanges
        assert isinstance(exchange, ReduceScatterExchange)
        self._exchange = exchange
        self._partition = exchange.partition
        self._groups = exchange.shard_groups
        communicator = self._groups[HOST].communicator
        self._rank = communicator.rank
        self._owned: list[list[Piece]] = [[] for _ in self._partition.buckets]  # of this rank, by bucket
        for piece in self._partition.pieces(self._rank):
            self._owned[piece.bucket].append(piece)
        self.pieces = pieces_of_rank(self._partition, self._rank, [info.shape for info in fused.variables])
        precision = fused.update.options.precision
        kinds = [info.dtype if precision is None else precision.master_dtype(info.dtype) for info in fused.variables]
        self.dtypes = [np.dtype(NUMPY_DTYPES[kind]) for kind in kinds]
        self._buffers = BucketBuffers(communicator.allocate)

    def new_pieces(self) -> list[Array]:
        """Return arrays for this rank's pieces of the gradients."""
        return [empty_array(piece.own_shape, dtype) for piece, dtype in zip(self.pieces, self.dtypes, strict=True)]

    def copy_reduced(self, targets: Sequence[Array]) -> None:
        """Copy this rank's pieces of the reduced gradients out of the exchange, which may release them then.

        Args:
            targets: by place, of the pieces' own shapes.
        """
        exchange = self._exchange
        factor = exchange.pending_factor
        for target, own in zip(targets, self.pieces, strict=True):
            if not own.count:
                target.fill(0)
        for piece in itertools.chain.from_iterable(self._owned):
            begin = self._partition.buckets[piece.bucket].begin(self._rank)
            memory = exchange.shard(piece.bucket).slice(piece.offset - begin, piece.count)
            target = targets[piece.parameter]
            found = array_of_buffer(memory, target.shape)
            if factor == 1.0:
                _copy(target, found)
            elif is_narrow(memory.dtype):  # small values would vanish
                target[...] = (found.astype(np.float32) * np.float32(factor)).astype(target.dtype)
            else:
                np.multiply(found, found.dtype.type(factor), out=target)
        exchange.release_shards()

    def gather(self, own: Sequence[Array], leaves: Sequence[Array]) -> None:
        """Gather the pieces of all ranks into whole leaves. Collective over the shard group.

        A bucket is gathered while the one before it is copied out.

        Args:
            own: pieces of this rank, by place; of any types.
            leaves: of the same types. One may have the memory of the piece of the same place.
        """
        before: tuple[int, ShardGather, Buffer, Buffer] | None = None
        for number, bucket in enumerate(self._partition.buckets):
            kinds = {own[slot.parameter].dtype for slot in bucket.slots}
            dtype = DType(np.dtype(functools.reduce(jnp.promote_types, kinds)).name) if kinds else bucket.dtype
            pooled, memory = self._buffers.acquire(bucket.count * dtype.itemsize)
            memory = memory.cast(dtype)
            for piece in self._owned[number]:
                _copy(array_of_buffer(memory.slice(piece.offset, piece.count)), own[piece.parameter].reshape(-1))
            gather = ShardGather(self._partition, {number: memory}, self._groups, self.fused.update.context.recorder)
            gather.post(number)
            if before is not None:
                self._copy_gathered(*before, leaves)
            before = number, gather, memory, pooled
        if before is not None:
            self._copy_gathered(*before, leaves)

    def _copy_gathered(
        self, number: int, gather: ShardGather, memory: Buffer, pooled: Buffer, leaves: Sequence[Array]
    ) -> None:
        gather.wait()
        for slot in self._partition.buckets[number].slots:
            leaf = leaves[slot.parameter]
            _copy(leaf, array_of_buffer(memory.slice(slot.offset, slot.count), leaf.shape))
        self._buffers.release(pooled)


def _copy(target: Array, source: Array) -> None:
    if target.dtype == source.dtype:
        copy_array(target, source)
    else:
        target[...] = source.astype(target.dtype)


class PieceOperation(HostOperation):
    """An operation on the pieces of one optimizer."""

    can_be_batched: ClassVar[bool] = False

    def __init__(self, cell: Cell[PieceExchange]) -> None:
        self._cell = cell

    @property
    def _pieces(self) -> list[LeafPiece]:
        return self._cell.value.pieces


class ReducePieces(PieceOperation):
    """Completes a pass: gradients of all leaves in; whether it completes an update, and this rank's pieces, out.

    Args:
        cell: the exchange.
        early: places of gradients that were handed over in the backward pass.
    """

    def __init__(self, cell: Cell[PieceExchange], early: Sequence[int]) -> None:
        super().__init__(cell)
        self._early = frozenset(early)

    @property
    @override
    def title(self) -> str:
        return "the exchange of gradients by a distributed optimizer with zero"

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        pieces = zip(self._pieces, self._cell.value.dtypes, strict=True)
        return [_FLAG, *(ShapeDtype(piece.own_shape, dtype) for piece, dtype in pieces)]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        exchange = self._cell.value
        flag, *targets = results
        own = {place: array for place, array in enumerate(operands) if place not in self._early}
        outcome = exchange.fused.run(own)
        flag[...] = outcome.complete
        if outcome.complete:
            exchange.copy_reduced(targets)


class GatherUpdates(PieceOperation):
    """Gathers the pieces of the updates into whole leaves: this ends an update."""

    @property
    @override
    def title(self) -> str:
        return "the gathering of updates by a distributed optimizer with zero"

    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        pieces = zip(self._pieces, operands, strict=True)
        return [ShapeDtype(piece.shape, operand.dtype) for piece, operand in pieces]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        exchange = self._cell.value
        exchange.gather(operands, results)
        exchange.fused.update.applied()
