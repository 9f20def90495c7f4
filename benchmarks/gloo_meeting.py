"""The ranks of the PyTorch benchmarks meet over gloo, which is nobody's engine here.

PyTorch imports `torch.distributed.nn.functional` when a first optimizer is made, and the defaults of its functions keep
the group that there is at that time. Its threads are then there when Python ends, and the release of a last result in
one of them aborts the process (seen with 2.13, in one of ten runs under load). Imported before there is a group, as
here, it keeps none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401 - see above

from unidist_bench import BenchmarkRanks, Durations


def gloo_meeting() -> BenchmarkRanks:
    """Return the meeting of all ranks; torch.distributed is initialised."""

    def all_durations(own: Durations) -> Sequence[Durations]:
        everyone: list[Durations | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        return cast("list[Durations]", everyone)

    return BenchmarkRanks(dist.barrier, all_durations)
