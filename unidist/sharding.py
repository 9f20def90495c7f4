"""Which sample goes to which rank. Pure arithmetic, the same on every rank."""

from __future__ import annotations

import random


def shuffled(count: int, *, seed: int, epoch: int) -> list[int]:
    """Return the numbers below `count` in an order that depends on seed and epoch alone."""
    indices = list(range(count))
    random.Random(seed + epoch).shuffle(indices)
    return indices


def padded_share(indices: list[int], *, rank: int, size: int) -> list[int]:
    """Return every `size`-th index from `rank` on, after the first ones were repeated until all shares are equal."""
    missing = -len(indices) % size
    padded = indices + [indices[i % len(indices)] for i in range(missing)] if indices else []
    return padded[rank::size]
