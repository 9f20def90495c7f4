"""Sums over the ranks in a program of XLA, of small arrays together: a collective over gloo costs milliseconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SMALL_BYTES = 1 << 20
"""Arrays up to this size are copied into one with others of their type. Larger ones are summed in place."""


def summed(arrays: Sequence[Any], axis: str) -> list[Any]:
    """Return the sum over the ranks of each array; of booleans, whether any is true.

    Args:
        arrays: tracers or arrays, of any types and shapes.
        axis: on which each rank is a device.
    """
    results = list(arrays)
    groups: dict[Any, list[int]] = defaultdict(list)
    for place, array in enumerate(arrays):
        if array.size:
            is_small = array.size * array.dtype.itemsize <= _SMALL_BYTES
            groups[(array.dtype, None if is_small else place)].append(place)
    for (dtype, _), places in groups.items():
        is_bool = dtype.kind == "b"
        given = [arrays[place].astype(np.int32) if is_bool else arrays[place] for place in places]
        if len(given) == 1:
            totals = [jax.lax.psum(given[0], axis)]
        else:
            together = jax.lax.psum(jnp.concatenate([each.reshape(-1) for each in given]), axis)
            ends = np.cumsum([each.size for each in given])[:-1]
            parts = jnp.split(together, ends)
            totals = [part.reshape(each.shape) for part, each in zip(parts, given, strict=True)]
        for place, total in zip(places, totals, strict=True):
            results[place] = total > 0 if is_bool else total
    return results
