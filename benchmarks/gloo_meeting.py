"""The ranks of the PyTorch benchmarks meet over gloo, which is nobody's engine here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch.distributed as dist

from unidist_bench import BenchmarkRanks, Durations


def gloo_meeting() -> BenchmarkRanks:
    """Return the meeting of all ranks; torch.distributed is initialised."""

    def all_durations(own: Durations) -> Sequence[Durations]:
        everyone: list[Durations | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        return cast("list[Durations]", everyone)

    return BenchmarkRanks(dist.barrier, all_durations)
