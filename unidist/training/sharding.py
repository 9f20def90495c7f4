"""Which sample goes to which rank. Pure arithmetic, the same on every rank."""

from __future__ import annotations

from typing import Literal, get_args

from unidist.elastic.batches import shuffled
from unidist.errors import UsageError

Tail = Literal["pad", "drop", "join"]
"""What happens to samples that do not divide: repeat the first ones, leave the last ones out, or deal them out too."""


def padded_share(indices: list[int], *, rank: int, size: int) -> list[int]:
    """Return every `size`-th index from `rank` on, after the first ones were repeated until all shares are equal."""
    missing = -len(indices) % size
    padded = indices + [indices[i % len(indices)] for i in range(missing)] if indices else []
    return padded[rank::size]


def check_tail(tail: str) -> None:
    """Raise UsageError unless it is one of the tails."""
    if tail not in get_args(Tail):
        raise UsageError(f"tail={tail!r}; choices: {', '.join(get_args(Tail))}")


def share(count: int, *, rank: int, size: int, seed: int, epoch: int, shuffle: bool, tail: Tail) -> list[int]:
    """Return a rank's samples of one epoch, of `count` in all: without padding each is on one rank.

    Args:
        count: samples of the dataset.
        rank: whose share.
        size: number of ranks.
        seed: of the order.
        epoch: of the order.
        shuffle: in another order in each epoch, else in that of the dataset.
        tail: see `Tail`. With "join" the first ranks may have one sample more than the others.
    """
    order = shuffled(count, seed=seed, epoch=epoch) if shuffle else list(range(count))
    if tail == "pad":
        return padded_share(order, rank=rank, size=size)
    if tail == "drop":
        order = order[: count - count % size]
    return order[rank::size]


__all__ = ["Tail", "check_tail", "padded_share", "share", "shuffled"]
