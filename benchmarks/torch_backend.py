"""PyTorch's own ways to train, and its all-reduce, over the backend `unidist` beside gloo and beside no exchange.

Run by `python -m benchmarks`, which starts it on two ranks. All backends have a group in the same processes. The steps
without an exchange have all the other work of DDP and FSDP2: they are what no backend can go below.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend `fake`

from benchmarks.gloo_meeting import gloo_meeting
from benchmarks.gpt_step import Wrap, make_step
from unidist_bench import side_by_side

LARGE, SMALL = 25_000_000, 1024  # float32 elements: 100 MB, 4 KB


def data_parallel(group: dist.ProcessGroup) -> Wrap:
    """Return what wraps a model in DistributedDataParallel."""
    return lambda model, optimizer: (DistributedDataParallel(model, process_group=group), optimizer)


def _done(bucket: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket)
    return done


def data_parallel_alone(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Wrap `model` in a DistributedDataParallel that fills its buckets, and exchanges nothing."""
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer()))
    return wrapped, optimizer


def fully_sharded(group: dist.ProcessGroup) -> Wrap:
    """Return what shards a model by FSDP2, by blocks."""

    def wrap(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        mesh = DeviceMesh.from_group(group, "cpu")
        for block in model.blocks:  # type: ignore[union-attr]  # of the GPT
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    return wrap


def main(output: str, repetitions: int) -> None:
    """Measure, and let rank 0 write the medians (seconds) to `output`."""
    torch.set_num_threads(1)
    dist.init_process_group("unidist")
    ours, theirs = dist.group.WORLD, dist.new_group(backend="gloo")
    assert ours is not None
    meeting = gloo_meeting()
    large, small = torch.zeros(LARGE), torch.zeros(SMALL)
    found = side_by_side(
        {
            "100 MB, unidist": lambda: dist.all_reduce(large, group=ours),
            "100 MB, gloo": lambda: dist.all_reduce(large, group=theirs),
        },
        meeting,
        repetitions=repetitions,
    )
    found |= side_by_side(
        {
            "4 KB, unidist": lambda: dist.all_reduce(small, group=ours),
            "4 KB, gloo": lambda: dist.all_reduce(small, group=theirs),
        },
        meeting,
        repetitions=5 * repetitions,
        inner=20,
    )
    steps = {
        "DDP, no exchange": make_step(data_parallel_alone),
        "FSDP2, no exchange": make_step(fully_sharded(dist.new_group(backend="fake"))),
    }
    for name, wrap in (("DDP", data_parallel), ("FSDP2", fully_sharded)):
        for backend, group in (("unidist", ours), ("gloo", theirs)):
            steps[f"{name}, {backend}"] = make_step(wrap(group))
    found |= side_by_side(steps, meeting, repetitions=repetitions)
    if dist.get_rank() == 0:
        with open(output, "w") as file:
            json.dump(found, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
