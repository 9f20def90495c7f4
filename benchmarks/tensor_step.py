"""A training step of 12 blocks that are cut over two ranks, beside one process, and beside PyTorch's DTensor.

Run by `python -m benchmarks`, which starts it on two ranks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import unidist.torch as ud
from benchmarks.gloo_meeting import gloo_meeting
from unidist_bench import side_by_side

BLOCKS, WIDTH, HIDDEN, BATCH = 12, 512, 2048, 512


class Block(nn.Module):
    """A residual net of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of `x`."""
        return x + self.net(x)


def model() -> nn.Module:
    """Return the blocks, with equal values on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def step(blocks: nn.Module, optimizer: Any) -> Callable[[], None]:
    """Return one training step on a batch that is the same everywhere."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)

    def run() -> None:
        nn.functional.mse_loss(blocks(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def variants() -> dict[str, Callable[[], object]]:
    """Return what is measured. Collective."""
    whole = model()
    alone = step(whole, torch.optim.SGD(whole.parameters(), lr=0.01))
    cut = model()
    cut, optimizer = ud.distribute(cut, torch.optim.SGD(cut.parameters(), lr=0.01), f"tensor={ud.size()}")
    plan = {f"{number}.net.{layer}": style() for number in range(BLOCKS) for layer, style in LAYERS.items()}
    theirs = parallelize_module(model(), init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    return {
        "one process": alone if ud.rank() == 0 else lambda: None,
        "tensor=2": step(cut, optimizer),
        "DTensor over gloo": step(theirs, torch.optim.SGD(theirs.parameters(), lr=0.01)),
    }


LAYERS: dict[str, Callable[[], Any]] = {"0": ColwiseParallel, "2": RowwiseParallel}


def main(output: str, repetitions: int) -> None:
    """Measure, and write the medians."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ud.init()
    medians = side_by_side(variants(), gloo_meeting(), repetitions=repetitions)
    if ud.rank() == 0:
        Path(output).write_text(json.dumps(medians))
    ud.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
