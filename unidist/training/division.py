"""Global batches: the items of an epoch that all ranks together process in one step. Pure.

Items are samples, whole batches or elements of a stream. Every rank goes through the same sequence of items. A position
in that sequence does not depend on the number of ranks, so any number of ranks can divide the rest of an epoch.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, TypeVar

from unidist.training.sharding import Tail

T = TypeVar("T")


def global_batches(items: Iterable[T], *, batch_size: int, size: int, tail: Tail, start: int = 0) -> Iterator[list[T]]:
    """Yield the global batches of an epoch, each a list of `batch_size * size` items; the last one may be smaller.

    >>> list(global_batches("abcdefg", batch_size=2, size=2, tail="pad"))
    [['a', 'b', 'c', 'd'], ['e', 'f', 'g', 'a']]

    Args:
        items: of the whole epoch, the same on every rank; may have no end.
        batch_size: items of one rank.
        size: number of ranks.
        tail: what happens to items that do not divide, see `Tail`.
        start: number of items that have been processed before.
    """
    rest = iter(items)
    first = list(islice(rest, size))  # those that "pad" repeats
    rest = chain(first[start:], islice(rest, max(0, start - len(first)), None))
    while batch := list(islice(rest, batch_size * size)):
        missing = -len(batch) % size
        if missing and tail == "pad":
            batch += [first[number % len(first)] for number in range(missing)]
        elif missing and tail == "drop":
            del batch[len(batch) - len(batch) % size :]
        if batch:
            yield batch


def part_of_rank(batch: Sequence[T], rank: int, size: int, cost: Callable[[T], float] | None = None) -> list[T]:
    """Return a rank's items of a global batch.

    Args:
        batch: the same on every rank.
        rank: whose items.
        size: number of ranks.
        cost: of an item, so that the ranks' sums are about equal; None: every `size`-th item.
    """
    if cost is None:
        return list(batch[rank::size])
    return [batch[place] for place in balanced([float(cost(item)) for item in batch], size)[rank]]


def length_of_rank(count: int, rank: int, size: int, tail: Tail) -> int:
    """Return the number of a rank's items of an epoch of `count` items."""
    if tail == "join":
        return len(range(rank, count, size))
    return -(-count // size) if tail == "pad" else count // size


def balanced(costs: Sequence[float], size: int) -> list[list[int]]:
    """Divide items so that the sums of their costs are about equal, and their numbers differ by one at most.

    The most expensive item goes to the rank with the smallest sum that has room, and so on (R. L. Graham, Bounds on
    multiprocessing timing anomalies, 1969, with a limit to the number of items).

    >>> balanced([9, 1, 2, 8, 5, 5], 2)
    [[0, 1, 4], [2, 3, 5]]

    Args:
        costs: of the items.
        size: number of ranks.

    Returns:
        Each rank's items, by their places in `costs`, in their order there. The first ranks have those that do not
        divide.
    """
    room = [len(range(rank, len(costs), size)) for rank in range(size)]
    sums = [(0.0, rank) for rank in range(size) if room[rank]]
    places: list[list[int]] = [[] for _ in range(size)]
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        total, rank = heapq.heappop(sums)
        places[rank].append(place)
        if len(places[rank]) < room[rank]:
            heapq.heappush(sums, (total + costs[place], rank))
    return [sorted(each) for each in places]


def fingerprint(items: Iterable[Any]) -> int:
    """Return a number that tells sequences of indices, or of lists of indices, apart; the same in every process."""
    return zlib.crc32(",".join(map(_text, items)).encode())


def _text(item: Any) -> str:
    if hasattr(item, "tolist"):  # of an array or a tensor
        item = item.tolist()
    if isinstance(item, list | tuple):
        return f"({','.join(map(_text, item))})"
    return repr(item) if isinstance(item, int | float | str | bytes | bool | None) else type(item).__name__
