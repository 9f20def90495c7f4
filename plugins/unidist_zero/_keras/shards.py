"""This rank's shard of a Keras model, as the variables that a Keras optimizer is built for.

An element-wise optimizer gets flat variables, one for each `Segment`; one that needs whole variables gets variables of
the shapes and paths of the model's. They are filled from the model before each step, so what a script assigns to the
model counts; if a variable of 16 bits is updated in 32, only elements that have changed are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import tensorflow as tf

from unidist.buffer import DType
from unidist_arrays.fused_exchange import FusedExchange
from unidist_arrays.slices import Slices
from unidist_keras.variables import variable_at
from unidist_tensorflow.memory import NUMPY_DTYPES, Array, dtype_of
from unidist_tensorflow.optimizer.stochastic_rounding import Elements
from unidist_zero.sharding.partition import Partition, Piece, Segment, join_segments


@dataclass(frozen=True)
class VariableShard:
    """One variable of the optimizer.

    Args:
        segment: its elements.
        variable: `(segment.count,)`, or the shape of the model's variable that it is a copy of.
        dtype: of the model's variables; that of `variable` may be wider.
        exchange: number of the exchange of its gradient.
    """

    segment: Segment
    variable: Any
    dtype: DType
    exchange: int = 0

    @property
    def places(self) -> list[int]:
        """Return the numbers of the model's variables that it has elements of."""
        return [piece.parameter for piece in self.segment.pieces]

    @property
    def sizes(self) -> list[int]:
        """Return the sizes within the segment: of a piece, of the padding after it, and so on."""
        ends = [*(piece.offset for piece in self.segment.pieces), self.segment.offset + self.segment.count]
        sizes = []
        for piece, (start, end) in zip(self.segment.pieces, pairwise(ends), strict=True):
            sizes += [piece.count, end - start - piece.count]
        return sizes

    @property
    def elements(self) -> list[Elements]:
        """Return which elements of the model's variables it has; padding is counted with what is before it."""
        sizes = self.sizes
        return [
            Elements(piece.parameter, piece.start, sizes[2 * i] + sizes[2 * i + 1])
            for i, piece in enumerate(self.segment.pieces)
        ]

    def is_sparse(self, exchange: FusedExchange) -> bool:
        """Return whether an exchange gathers the rows of the gradient of one of its variables."""
        return any(map(exchange.is_sparse, self.places))

    def with_slices(self, gradient: Array, exchange: FusedExchange) -> Slices:
        """Return this shard's gradient with each occurrence of each row that was gathered by itself.

        Args:
            gradient: of this shard, with zeros where rows were gathered.
            exchange: has gathered them.

        Returns:
            Rows, if the shard is a whole variable; elements, if it is flat.
        """
        found = []
        for piece in self.segment.pieces:
            begin = piece.offset - self.segment.offset
            rows = exchange.gathered.get(piece.parameter)
            if not exchange.is_sparse(piece.parameter):
                indices = np.arange(begin, begin + piece.count)
                found.append(Slices(gradient[indices], indices))
            elif rows is not None and gradient.ndim == 1:
                elements = rows.elements(piece.start, piece.start + piece.count)
                found.append(Slices(elements.values, elements.indices - piece.start + begin))
            elif rows is not None:
                found.append(rows)
        none = Slices(gradient[:0], np.empty(0, np.int64))
        values, indices = (
            np.concatenate([getattr(each, name) for each in (none, *found)]) for name in ("values", "indices")
        )
        return Slices(values.astype(gradient.dtype, copy=False), indices)

    def is_widened(self) -> bool:
        """Return whether its type differs from that of the model's variables."""
        return dtype_of(self.variable) != self.dtype

    def spread(self, values: tf.Tensor, fill: Any) -> tf.Tensor:
        """Expand one value for each model variable to one for each element.

        Args:
            values: `(places,)`, in the order of `places`.
            fill: for padding.
        """
        padding = tf.fill([len(self.places)], tf.constant(fill, values.dtype))
        mixed = tf.reshape(tf.stack([values, padding], axis=1), [-1])
        return tf.reshape(tf.repeat(mixed, self.sizes), self.variable.shape)

    def flat_pieces(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Split a tensor of this shard's shape into one for each of `places`."""
        parts: list[tf.Tensor] = tf.split(tf.reshape(tensor, [-1]), self.sizes)
        return parts[::2]

    def of_model(self, variables: Sequence[Any]) -> tf.Tensor:
        """Return this shard's elements of the model's variables, in the model's type."""
        parts = []
        sizes = self.sizes
        for i, piece in enumerate(self.segment.pieces):
            flat = tf.reshape(tf.convert_to_tensor(variables[piece.parameter]), [-1])
            parts.append(flat[piece.start : piece.start + piece.count])
            if sizes[2 * i + 1]:
                parts.append(tf.zeros([sizes[2 * i + 1]], flat.dtype))
        joined = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
        return tf.reshape(joined, self.variable.shape)

    def fill(self, variables: Sequence[Any]) -> None:
        """Copy the values of the model's variables."""
        values = self.of_model(variables)
        if self.is_widened():
            kept = tf.convert_to_tensor(self.variable)
            values = tf.where(tf.cast(kept, values.dtype) == values, kept, tf.cast(values, kept.dtype))
        self.variable.assign(values)


def make_shards(
    partition: Partition,
    owner: int,
    variables: Sequence[Any],
    masters: Sequence[DType],
    keys: Sequence[Any],
    *,
    exchange: int = 0,
) -> list[VariableShard]:
    """Return the shards of one rank, filled from the model.

    Args:
        partition: of the gradients of `variables`, or of some, by place.
        owner: the rank within its shard group.
        variables: of the model, by place.
        masters: for each the type in which it is updated.
        keys: for each; equal within a shard.
        exchange: number of the exchange that the partition belongs to.
    """
    pieces = partition.pieces(owner)
    if partition.whole:
        segments = [Segment(piece.bucket, piece.offset, piece.count, (piece,)) for piece in pieces]
    else:
        segments = join_segments(pieces, [(masters[piece.parameter], keys[piece.parameter]) for piece in pieces])
    return [
        _shard(partition, segment, variables, masters[segment.pieces[0].parameter], exchange) for segment in segments
    ]


def _shard(
    partition: Partition, segment: Segment, variables: Sequence[Any], master: DType, exchange: int
) -> VariableShard:
    first: Piece = segment.pieces[0]
    of_model = variables[first.parameter]
    shape = tuple(of_model.shape) if partition.whole else (segment.count,)
    path = str(getattr(of_model, "path", of_model.name)).split(":")[0]
    if not partition.whole:  # no optimizer goes by the name of a shard with parts of several variables
        path = f"shard_{segment.bucket}_{segment.offset}{f'_of_{exchange}' if exchange else ''}"
    variable = variable_at(path, np.zeros(shape, NUMPY_DTYPES[master]), str(master))
    shard = VariableShard(segment, variable, partition.buckets[segment.bucket].dtype, exchange)
    variable.assign(tf.cast(shard.of_model(variables), variable.dtype))
    return shard
