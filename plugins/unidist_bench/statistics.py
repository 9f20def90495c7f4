"""Figures of one measured size: times, and the bandwidths that follow from them. Pure.

Bandwidths are those of nccl-tests (https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md). The algorithm bandwidth
is size by time. The bus bandwidth is that times a factor, so that it can be compared with what the hardware moves,
whatever the number of ranks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from unidist_bench.collectives import Collective


def bus_factor(collective: Collective, num_ranks: int) -> float:
    """Return bus bandwidth by algorithm bandwidth, from nccl-tests; 0 for a barrier, which moves nothing."""
    match collective:
        case Collective.ALLREDUCE:
            return 2 * (num_ranks - 1) / num_ranks
        case Collective.ALLGATHER | Collective.REDUCESCATTER | Collective.ALLTOALL:
            return (num_ranks - 1) / num_ranks
        case Collective.BROADCAST | Collective.SENDRECV:
            return 1.0
        case Collective.BARRIER:
            return 0.0


def percentile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that is not below `part` of all values (0.99 for p99): the nearest rank."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


@dataclass(frozen=True)
class Figures:
    """Times of one side for one size.

    Args:
        min: seconds of the fastest repetition, of its slowest rank.
        median: seconds of the median repetition.
        p99: seconds that 99 of 100 repetitions did not exceed.
        wrong: elements with a wrong result on all ranks together; None: not checked.
    """

    min: float
    median: float
    p99: float
    wrong: int | None = None

    @classmethod
    def of(cls, durations: Sequence[float], *, wrong: int | None = None) -> Figures:
        """Return the figures of these durations, in seconds; at least one."""
        return cls(min(durations), statistics.median(durations), percentile(durations, 0.99), wrong)

    def algorithm_bandwidth(self, num_bytes: int) -> float:
        """Return bytes per second, by the median."""
        return num_bytes / self.median

    def bus_bandwidth(self, num_bytes: int, collective: Collective, num_ranks: int) -> float:
        """Return bytes per second, by the median and `bus_factor`."""
        return self.algorithm_bandwidth(num_bytes) * bus_factor(collective, num_ranks)
