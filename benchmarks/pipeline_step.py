"""A training step of 12 blocks in a pipeline of two ranks, beside one process, and beside PyTorch's 1F1B over gloo.

Run by `python -m benchmarks`, which starts it on two ranks. "half the blocks" is the work of one rank on all
micro-batches, both ranks at once, with no exchange and no waiting: what no schedule can go below.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import unidist.torch as ud
from benchmarks.gloo_meeting import gloo_meeting
from benchmarks.tensor_step import BATCH, BLOCKS, WIDTH, model, step
from unidist_bench import side_by_side

MICROBATCHES = (8, 4)
SCHEDULES = ("1f1b", "zb-h1")


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, the same everywhere."""
    torch.manual_seed(1)
    return torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)


def half(microbatches: int) -> Callable[[], object]:
    """Return a step of this rank's blocks alone."""
    blocks = model()[: BLOCKS // dist.get_world_size()]  # type: ignore[index]  # a Sequential
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.01)
    inputs, targets = (part.chunk(microbatches) for part in batch())

    def run() -> None:
        for some, wanted in zip(inputs, targets, strict=True):
            (nn.functional.mse_loss(blocks(some), wanted) / microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def ours(schedule: str, microbatches: int) -> Callable[[], object]:
    """Return a step of a pipeline of unidist."""
    blocks = model()
    line = f"pipeline={ud.size()}:schedule={schedule}:microbatches={microbatches}"
    train = ud.TrainStep(blocks, torch.optim.SGD(blocks.parameters(), lr=0.01), nn.functional.mse_loss, line)
    inputs, targets = batch()
    return lambda: train(inputs, targets)


def theirs(microbatches: int) -> Callable[[], object]:
    """Return a step of PyTorch's pipeline."""
    rank, size = dist.get_rank(), dist.get_world_size()
    each = BLOCKS // size
    part = model()[rank * each : (rank + 1) * each]  # type: ignore[index]  # a Sequential
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
    inputs, targets = batch()

    def run() -> None:
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets)
        optimizer.step()
        optimizer.zero_grad()

    return run


def main(output: str, repetitions: int) -> None:
    """Measure, and write the medians."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ud.init()
    whole = model()
    alone = step(whole, torch.optim.SGD(whole.parameters(), lr=0.01))
    variants: dict[str, Callable[[], object]] = {
        "one process": alone if ud.rank() == 0 else lambda: None,
    }
    for count in MICROBATCHES:
        variants[f"half the blocks, {count}"] = half(count)
        variants |= {f"{schedule}, {count}": ours(schedule, count) for schedule in SCHEDULES}
        variants[f"PyTorch 1F1B over gloo, {count}"] = theirs(count)
    medians = side_by_side(variants, gloo_meeting(), repetitions=repetitions)
    if ud.rank() == 0:
        Path(output).write_text(json.dumps(medians))
    ud.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
