"""All-reduce through unidist's public calls beside torch.distributed's gloo. Run by `python -m benchmarks`."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

import unidist.torch as ud
from benchmarks.gloo_meeting import gloo_meeting
from unidist_bench import side_by_side

LARGE, SMALL = 25_000_000, 1024  # float32 elements: 100 MB, 4 KB


def main(output: str, repetitions: int) -> None:
    """Measure, and let rank 0 write the medians (seconds) to `output`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ud.init()
    meeting = gloo_meeting()
    world = ud.world()
    engine, ordinary, theirs = ud.empty(LARGE), torch.zeros(LARGE), torch.zeros(LARGE)
    large = side_by_side(
        {
            "100 MB, engine memory": lambda: ud.allreduce_(engine, name="engine"),
            "100 MB, ordinary memory": lambda: ud.allreduce_(ordinary, name="ordinary"),
            "100 MB, gloo": lambda: dist.all_reduce(theirs),
        },
        meeting,
        repetitions=repetitions,
    )
    small, small_theirs = torch.zeros(SMALL), torch.zeros(SMALL)
    buffer = ud.buffer(small)
    latency = side_by_side(
        {
            "4 KB, named": lambda: ud.allreduce_(small, name="small"),
            "4 KB, world()": lambda: world.allreduce(buffer, buffer).wait(),
            "4 KB, gloo": lambda: dist.all_reduce(small_theirs),
        },
        meeting,
        repetitions=5 * repetitions,
        inner=20,
    )
    if ud.rank() == 0:
        with open(output, "w") as file:
            json.dump({**large, **latency}, file)
    ud.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
