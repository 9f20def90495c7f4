"""One training step of the GPT with shared optimizer state, gradients and parameters, beside PyTorch's own.

Run by `python -m benchmarks`, which starts it on two ranks.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import unidist.torch as ud
from benchmarks.gpt_step import Wrap, measure


def zero(strategy: str) -> Wrap:
    """Return what makes a model and an optimizer share as a strategy line says."""
    return lambda model, optimizer: ud.distribute(model, optimizer, strategy)


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


if __name__ == "__main__":
    measure(
        {
            **{line: zero(line) for line in ("zero=1", "zero=2", "zero=3", "zero=3:shared=false")},
            "ZeroRedundancyOptimizer": redundancy_optimizer,
            "FSDP2": fully_sharded,
        },
        sys.argv[1],
        int(sys.argv[2]),
    )
