"""The ranks of the PyTorch benchmarks meet over gloo, which is nobody's engine here.

PyTorch imports `torch.distributed.nn.functional` when the first optimizer is made. The default arguments of its
functions then hold a reference to the default group, so gloo's threads outlive `destroy_process_group`, and one that
frees a result while the interpreter shuts down aborts the process (with 2.13, in one of ten runs under load). Importing
the module before the group exists, as here, avoids that.
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
