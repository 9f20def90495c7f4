"""All-reduce over the engine tcp, plain and encrypted, between the same ranks. Run by `python -m benchmarks`."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import numpy as np
import torch.distributed as dist

import unidist.torch as ud
from benchmarks.gloo_meeting import gloo_meeting
from unidist.buffer import Buffer
from unidist.communicator import Communicator
from unidist.runtime import LocalRendezvous
from unidist.settings.environment import set_variables
from unidist.topology import Topology
from unidist_bench import side_by_side
from unidist_tcp.engine import TcpEngine

LARGE, SMALL = 25_000_000, 1024  # float32 elements: 100 MB, 4 KB
_TIMEOUT = timedelta(seconds=120)


def connect(rank: int, size: int, *, tls: bool) -> Communicator:
    """Return a communicator over all ranks of this host."""
    key = f"{os.environ['UNIDIST_JOB_ID']}/tls={tls}"
    rendezvous = LocalRendezvous(rank=rank, world_size=size, key=key, secret=b"measured", timeout=_TIMEOUT)
    try:
        with set_variables({"UNIDIST_TLS": str(int(tls))}):
            return TcpEngine().connect(Topology(rank, size, rank, size), rendezvous, timeout=_TIMEOUT)
    finally:
        rendezvous.close()


def main(output: str, repetitions: int) -> None:
    """Measure, and let rank 0 write the medians (seconds) to `output`."""
    dist.init_process_group("gloo")
    ud.init()
    meeting = gloo_meeting()
    groups = {name: connect(ud.rank(), ud.size(), tls=tls) for name, tls in (("plain", False), ("--tls", True))}
    assert "with TLS" in groups["--tls"].description
    found = {}
    for size, count, inner in (("100 MB", LARGE, 1), ("4 KB", SMALL, 20)):
        memory = Buffer.of(np.zeros(count, np.float32))
        variants = {
            f"{size}, {name}": lambda group=group, memory=memory: group.allreduce(memory, memory).wait()
            for name, group in groups.items()
        }
        found |= side_by_side(variants, meeting, repetitions=repetitions * (1 if inner == 1 else 5), inner=inner)
    if ud.rank() == 0:
        with open(output, "w") as file:
            json.dump(found, file)
    for group in groups.values():
        group.close()
    ud.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
