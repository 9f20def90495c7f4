"""Stochastic rounding of float32 to bfloat16, by numbers that depend on an element's place alone.

As `unidist_torch.optimizer.stochastic_rounding`, which says why, with the numbers of
`unidist_jax.optimizer.stochastic_rounding`: a graph does not know the number of the update when it is traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from unidist.optim.rounding_key import HASH_FACTORS, RoundingKey

__all__ = ["Elements", "round_stochastically"]


class Elements(NamedTuple):
    """A range of the elements of a variable of the model.

    Attributes:
        place: number of the variable.
        start: index of the first element.
        length: number of elements.
    """

    place: int
    start: int
    length: int


def round_stochastically(wide: tf.Tensor, elements: Sequence[Elements], use: object, number: tf.Tensor) -> tf.Tensor:
    """Return float32 values, rounded to bfloat16. NaN and infinities stay what they are.

    Args:
        wide: float32, of any shape.
        elements: which ones these are, one range after the other.
        use: of the values.
        number: of the update, a uint32 scalar.
    """
    parts = [random_bits(each.length, RoundingKey.of(each.place, use), number, each.start) for each in elements]
    noise = tf.reshape(tf.concat(parts, 0), wide.shape)
    bits = tf.bitcast(wide, tf.uint32)
    # The upper 16 bits are the bfloat16 towards zero, the lower ones the distance from it.
    rounded = tf.bitcast(tf.bitwise.bitwise_and(bits + noise, _constant(0xFFFF0000)), tf.float32)
    return tf.cast(tf.where(tf.math.is_nan(wide), wide, rounded), tf.bfloat16)


def random_bits(count: int, key: RoundingKey, number: tf.Tensor, start: int) -> tf.Tensor:
    """Return `count` evenly distributed numbers of 16 bits, as uint32; those of neighbours are independent."""
    golden = _constant(HASH_FACTORS[0])
    first, second = (_mixed(number * golden + _constant(word), _constant(0)) for word in key)
    bits = tf.cast(tf.range(count), tf.uint32) * golden + _constant(start * HASH_FACTORS[0]) + first
    return tf.bitwise.right_shift(_mixed(bits, second), _constant(16))


def _mixed(bits: tf.Tensor, between: tf.Tensor) -> tf.Tensor:
    """Return the numbers, of which each bit depends on all."""
    first, second = (_constant(factor) for factor in HASH_FACTORS[1:])
    bits = tf.bitwise.bitwise_xor(_folded(bits, 16) * first, between)
    return _folded(bits, 13) * second


def _folded(bits: tf.Tensor, shift: int) -> tf.Tensor:
    """XOR the numbers with their own upper bits, shifted down."""
    return tf.bitwise.bitwise_xor(bits, tf.bitwise.right_shift(bits, _constant(shift)))


def _constant(number: int) -> tf.Tensor:
    """Return a uint32; bits above 32 are left out."""
    return tf.constant(number & 0xFFFFFFFF, tf.uint32)
