"""One rank of `make bench-gpu`: measures one of its tables. Started by `benchmarks.gpu`. Never run on a GPU so far."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import unidist.torch as ud
from benchmarks.gloo_meeting import gloo_meeting
from benchmarks.gpt import CONTEXT, GPT, VOCABULARY
from unidist.runtime import context
from unidist_bench import side_by_side

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
INNER = 20
"""All-reduces of which one time is taken, as nccl-tests does."""
BATCH = 32


def bandwidth(repetitions: int) -> dict[str, float]:
    """Return the seconds of one all-reduce, by side and size."""
    world, medians = context.current().communicator("cuda"), {}
    for nbytes in SIZES:
        tensor = torch.zeros(nbytes // 4, device=ud.device())
        buffer = ud.buffer(tensor)

        def ours(buffer: object = buffer) -> None:
            for _ in range(INNER):
                world.allreduce(buffer, buffer).wait()  # type: ignore[arg-type]  # bound early
            torch.cuda.synchronize()

        def theirs(tensor: torch.Tensor = tensor) -> None:
            for _ in range(INNER):
                dist.all_reduce(tensor)
            torch.cuda.synchronize()

        def named(tensor: torch.Tensor = tensor) -> None:
            for _ in range(INNER):
                ud.allreduce_(tensor, op=ud.Sum)
            torch.cuda.synchronize()

        sides = {"unidist": ours, "unidist by name": named, "torch.distributed": theirs}
        found = side_by_side(sides, gloo_meeting(), repetitions=repetitions)
        medians |= {f"{side}, {nbytes}": seconds / INNER for side, seconds in found.items()}
    return medians


def make_step(side: str) -> Callable[[], None]:
    """Return a function that does one step of a model of its own: of a strategy line, or "DDP" or "FSDP2"."""
    torch.manual_seed(0)
    device = ud.device()
    model: torch.nn.Module = GPT().to(device)
    if side == "DDP":
        model = DistributedDataParallel(model, device_ids=[device])
    elif side == "FSDP2":
        for block in model.blocks:  # type: ignore[union-attr]  # the GPT's
            fully_shard(block)
        fully_shard(model)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    if side not in ("DDP", "FSDP2"):
        model, optimizer = ud.distribute(model, optimizer, side)
    ids = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), device=device)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(ids[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        torch.cuda.synchronize()

    return step


def steps(repetitions: int) -> dict[str, float]:
    """Return the seconds of a step, by side."""
    sides = {"DDP": "DDP", "unidist data of DDP": "data", "FSDP2": "FSDP2", "unidist zero=3 of FSDP2": "zero=3"}
    made = {name: make_step(side) for name, side in sides.items()}
    return side_by_side(made, gloo_meeting(), repetitions=repetitions)


def memory(repetitions: int, side: str) -> dict[str, float]:
    """Return the bytes of the device that training keeps, and its peak."""
    step = make_step(side)
    step()  # makes the optimizer's state
    torch.cuda.reset_peak_memory_stats()
    for _ in range(repetitions):
        step()
    return {"kept": float(torch.cuda.memory_allocated()), "peak": float(torch.cuda.max_memory_allocated())}


def main(output: str, repetitions: int, what: str, *arguments: str) -> None:
    """Measure one table; rank 0 writes it."""
    ud.init()
    torch.cuda.set_device(ud.device())
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=ud.device())
    measures: dict[str, Callable[..., dict[str, float]]] = {"bandwidth": bandwidth, "step": steps, "memory": memory}
    found = measures[what](repetitions, *arguments)
    if ud.rank() == 0:
        with open(output, "w") as file:
            json.dump(found, file)
    dist.destroy_process_group()
    ud.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
