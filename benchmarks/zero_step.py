"""One training step of the GPT with shared optimizer state, gradients and parameters, beside PyTorch's own.

Run by `python -m benchmarks`, which starts it on two ranks.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import unidist.torch as ud
from benchmarks.gloo_meeting import gloo_meeting
from benchmarks.gpt_step import Wrap, make_step
from benchmarks.timing import side_by_side


def zero(stage: int) -> Wrap:
    """Return what makes a model and an optimizer share at a stage."""
    return lambda model, optimizer: ud.distribute(model, optimizer, f"zero={stage}")


def redundancy_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return DistributedDataParallel with ZeroRedundancyOptimizer."""
    wrapped = DistributedDataParallel(model)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=3e-4, fused=True)


def fully_sharded(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return FSDP2, by blocks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]  # of the GPT
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def main(output: str, repetitions: int) -> None:
    """Measure, and let rank 0 write the medians (seconds) to `output`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ud.init()
    meeting = gloo_meeting()
    medians = side_by_side(
        {
            "no communication": make_step(lambda model, optimizer: (model, optimizer)),
            "zero=1": make_step(zero(1)),
            "zero=2": make_step(zero(2)),
            "zero=3": make_step(zero(3)),
            "ZeroRedundancyOptimizer": make_step(redundancy_optimizer),
            "FSDP2": make_step(fully_sharded),
        },
        meeting,
        repetitions=repetitions,
    )
    if ud.rank() == 0:
        with open(output, "w") as file:
            json.dump(medians, file)
    ud.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
