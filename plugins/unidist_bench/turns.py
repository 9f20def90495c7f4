"""Taking turns: durations of things that are measured side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Durations = Sequence[Sequence[float]]
"""In seconds, by repetition and variant."""


@dataclass(frozen=True)
class BenchmarkRanks:
    """What the ranks of a benchmark do together.

    Args:
        barrier: before each measurement; not by what is measured, where that would favour one of them.
        all_durations: gives every rank the durations of all.
    """

    barrier: Callable[[], object]
    all_durations: Callable[[Durations], Sequence[Durations]]


def take_turns(
    variants: Mapping[str, Callable[[], object]],
    meeting: BenchmarkRanks,
    *,
    repetitions: int,
    warmup: int = 2,
    inner: int = 1,
) -> dict[str, list[float]]:
    """Return the durations of each variant in seconds, of the slowest rank in each repetition.

    In every repetition each variant runs once (`inner` times for short ones), in an order that rotates. Every rank
    calls this with the same arguments, and gets the same durations.

    Args:
        variants: name -> what to run.
        meeting: of the ranks.
        repetitions: counted repetitions.
        warmup: repetitions before, not counted.
        inner: calls per measurement; the duration of one is reported.
    """
    names = list(variants)
    durations = [[0.0] * len(names) for _ in range(repetitions)]
    for repetition in range(-warmup, repetitions):
        for turn in range(len(names)):
            column = (turn + repetition) % len(names)
            run = variants[names[column]]
            meeting.barrier()
            start = time.perf_counter()
            for _ in range(inner):
                run()
            elapsed = (time.perf_counter() - start) / inner
            if repetition >= 0:
                durations[repetition][column] = elapsed
    everyone = meeting.all_durations(durations)
    return {
        name: [max(rank[repetition][column] for rank in everyone) for repetition in range(repetitions)]
        for column, name in enumerate(names)
    }


def side_by_side(
    variants: Mapping[str, Callable[[], object]],
    meeting: BenchmarkRanks,
    *,
    repetitions: int,
    warmup: int = 2,
    inner: int = 1,
) -> dict[str, float]:
    """Return the median of the durations of each variant, in seconds; see `take_turns`."""
    found = take_turns(variants, meeting, repetitions=repetitions, warmup=warmup, inner=inner)
    return {name: statistics.median(durations) for name, durations in found.items()}
