"""Stochastic rounding of float32 to bfloat16, by numbers that depend on an element's place alone.

As `unidist_torch.optimizer.stochastic_rounding`, which says why. The number of the update is not known when a program
is traced, so it is mixed into the key there.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from unidist.optim.rounding_key import HASH_FACTORS, RoundingKey

__all__ = ["round_stochastically"]


def round_stochastically(wide: Any, key: RoundingKey, number: Any, start: int = 0) -> Any:
    """Return float32 values, rounded to bfloat16. NaN and infinities stay what they are.

    Args:
        wide: float32, of any shape.
        key: of the parameter and the use.
        number: of the update, a uint32 scalar.
        start: index of the first element in the whole parameter.
    """
    noise = random_bits(wide.size, key, number, start).reshape(wide.shape)
    bits = jax.lax.bitcast_convert_type(wide, jnp.uint32)
    # The upper 16 bits are the bfloat16 towards zero, the lower ones the distance from it.
    rounded = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isnan(wide), wide, rounded).astype(jnp.bfloat16)


def random_bits(count: int, key: RoundingKey, number: Any, start: int) -> Any:
    """Return `count` evenly distributed numbers of 16 bits, as uint32; those of neighbours are independent."""
    golden = jnp.uint32(HASH_FACTORS[0])
    number = jnp.asarray(number, jnp.uint32)
    first, second = (_mixed(number * golden + jnp.uint32(word)) for word in key)
    bits = jax.lax.iota(jnp.uint32, count) * golden + jnp.uint32(start * HASH_FACTORS[0] & 0xFFFFFFFF) + first
    return _mixed(bits, second) >> 16


def _mixed(bits: Any, between: Any = 0) -> Any:
    """Return the numbers, of which each bit depends on all."""
    first, second = (jnp.uint32(factor) for factor in HASH_FACTORS[1:])
    bits = ((bits ^ bits >> 16) * first) ^ jnp.uint32(between)
    return (bits ^ bits >> 13) * second
