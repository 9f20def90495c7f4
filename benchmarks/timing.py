"""Taking turns: medians of things that are measured side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist


def side_by_side(
    variants: Mapping[str, Callable[[], object]], *, repetitions: int, warmup: int = 2, inner: int = 1
) -> dict[str, float]:
    """Return the median duration of each variant in seconds, of the slowest rank in each repetition.

    In every repetition each variant runs once (`inner` times for short ones), in an order that rotates. All ranks call
    this alike, with torch.distributed initialised (gloo): its barrier separates the measurements.

    Args:
        variants: name -> what to run.
        repetitions: counted repetitions.
        warmup: repetitions before, not counted.
        inner: calls per measurement; the duration of one is reported.
    """
    names = list(variants)
    durations = torch.zeros(repetitions, len(names), dtype=torch.float64)
    for repetition in range(-warmup, repetitions):
        for turn in range(len(names)):
            column = (turn + repetition) % len(names)
            run = variants[names[column]]
            dist.barrier()
            start = time.perf_counter()
            for _ in range(inner):
                run()
            elapsed = (time.perf_counter() - start) / inner
            if repetition >= 0:
                durations[repetition, column] = elapsed
    dist.all_reduce(durations, op=dist.ReduceOp.MAX)
    return {name: statistics.median(durations[:, i].tolist()) for i, name in enumerate(names)}
