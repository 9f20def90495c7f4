"""unidist beside Horovod in the same processes. Run by `python -m benchmarks` under `horovodrun`.

With UNIDIST_ENGINE=shm it compares unidist as it is meant to be used with Horovod; with UNIDIST_ENGINE=horovod it
measures what going through unidist adds to Horovod.
"""

from __future__ import annotations

import json
import os
import statistics
import sys

import horovod.torch as hvd
import torch
import torch.distributed as dist

import unidist.torch as ud
from benchmarks.allreduce import LARGE, SMALL
from benchmarks.gloo_meeting import gloo_meeting
from benchmarks.gpt_step import make_step
from unidist_bench import BenchmarkRanks, side_by_side

_ROUNDS = 4


def main(output: str, repetitions: int) -> None:
    """Measure, and let rank 0 write the medians (seconds) to `output`."""
    torch.set_num_threads(1)
    ud.init()
    hvd.init()
    os.environ.update(RANK=str(hvd.rank()), WORLD_SIZE=str(hvd.size()))
    dist.init_process_group("gloo")  # for the barriers between measurements
    meeting = gloo_meeting()
    ours, theirs = ud.empty(LARGE), torch.zeros(LARGE)
    large = side_by_side(
        {
            "100 MB, unidist": lambda: ud.allreduce_(ours, name="ours", op=ud.Sum),
            "100 MB, Horovod": lambda: hvd.allreduce_(theirs, name="theirs", op=hvd.Sum),
        },
        meeting,
        repetitions=repetitions,
    )
    small = torch.zeros(SMALL)
    latency = side_by_side(
        {
            "4 KB, unidist": lambda: ud.allreduce_(small, name="small ours", op=ud.Sum),
            "4 KB, Horovod": lambda: hvd.allreduce_(small, name="small theirs", op=hvd.Sum),
        },
        meeting,
        repetitions=5 * repetitions,
        inner=20,
    )
    steps = _steps(meeting, repetitions, apart=os.environ["UNIDIST_ENGINE"] != "horovod")
    if ud.rank() == 0:
        with open(output, "w") as file:
            json.dump({**large, **latency, **steps}, file)
    dist.destroy_process_group()
    hvd.shutdown()
    ud.shutdown()


def _steps(meeting: BenchmarkRanks, repetitions: int, *, apart: bool) -> dict[str, float]:
    """Return the medians of a training step.

    Args:
        meeting: of the ranks.
        repetitions: of each variant.
        apart: Horovod is shut down while the others are measured, and started for its turns: its thread, which
            wakes a thousand times a second, is no part of theirs. Several rounds of turns; the median of their medians.
    """
    ours = {
        "GPT step, no communication": make_step(lambda model, optimizer: (model, optimizer)),
        "GPT step, unidist": make_step(
            lambda model, optimizer: (model, ud.DistributedOptimizer(optimizer, model.named_parameters()))
        ),
    }
    theirs = {
        "GPT step, Horovod": make_step(
            lambda model, optimizer: (model, hvd.DistributedOptimizer(optimizer, model.named_parameters()))
        )
    }
    if not apart:
        return side_by_side(ours | theirs, meeting, repetitions=repetitions)
    rounds = []
    for _ in range(_ROUNDS):
        hvd.shutdown()
        medians = side_by_side(ours, meeting, repetitions=-(-repetitions // _ROUNDS))
        hvd.init()
        rounds.append(medians | side_by_side(theirs, meeting, repetitions=-(-repetitions // _ROUNDS)))
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
