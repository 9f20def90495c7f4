"""Sizes of micro-batches: as equal as possible, larger ones first."""

from __future__ import annotations

from unidist.errors import UsageError


def sizes(num_samples: int, num_microbatches: int) -> list[int]:
    """Return the number of samples of each micro-batch; fewer micro-batches if there are too few samples.

    >>> sizes(10, 4)
    [3, 3, 2, 2]

    Raises:
        UsageError: there is no sample.
    """
    if num_samples < 1:
        raise UsageError("a pipeline was given a batch without samples; every rank needs at least one in each step")
    count = min(num_samples, num_microbatches)
    small, num_larger = divmod(num_samples, count)
    return [small + (index < num_larger) for index in range(count)]


def bounds(sizes: list[int]) -> list[tuple[int, int]]:
    """Return first and last sample (exclusive) of each micro-batch."""
    found, start = [], 0
    for size in sizes:
        found.append((start, start + size))
        start += size
    return found
