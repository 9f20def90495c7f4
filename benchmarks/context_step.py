"""A training step on one long sequence that is divided over two ranks, beside one process, and beside PyTorch's own.

PyTorch's context parallel (`torch.distributed.tensor.experimental.context_parallel`) has no rule for the CPU's kernel.
So its loop is called here with that kernel, over gloo; inputs are cut and gradients averaged by hand. Run by `python -m
benchmarks --only context`, which starts it on two ranks, and on four for the memory alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.functional import cross_entropy

import unidist.torch as ud
from benchmarks import gpt
from benchmarks.gloo_meeting import gloo_meeting
from unidist_bench import side_by_side

LAYERS = 2


class LongGPT(nn.Module):
    """Blocks of the benchmark's GPT on long sequences."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(512, gpt.WIDTH), nn.Embedding(tokens, gpt.WIDTH)
        self.blocks = nn.Sequential(*(gpt.Block() for _ in range(LAYERS)))
        self.head = nn.Linear(gpt.WIDTH, 512, bias=False)

    def forward(self, ids: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits `(batch, tokens, 512)`."""
        where = torch.arange(ids.shape[1]) if places is None else places
        return self.head(self.blocks(self.tokens(ids) + self.places(where)))


def build(tokens: int) -> Any:
    """Return the model, with equal values on every rank."""
    torch.manual_seed(0)
    return LongGPT(tokens)


def batch(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one sequence and its labels, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(512, (1, tokens + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def step(model: Any, optimizer: Any, tokens: int) -> Callable[[], float]:
    """Return one training step."""
    loss_of = forward(model, tokens)

    def run() -> float:
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return run


def forward(model: Any, tokens: int) -> Callable[[], torch.Tensor]:
    """Return the forward pass of one."""
    ids, labels = batch(tokens)
    return lambda: cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def step_of_torch(tokens: int) -> Callable[[], float]:
    """Return the same step by PyTorch's ring over gloo."""
    model = build(tokens)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rank, size = dist.get_rank(), dist.get_world_size()

    def own(x: torch.Tensor) -> torch.Tensor:
        chunks = x.chunk(2 * size, 1)
        return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], 1)

    ids, labels = map(own, batch(tokens))
    places = own(torch.arange(tokens)[None])

    def run() -> float:
        with mock.patch.object(gpt.functional, "scaled_dot_product_attention", _RingOfTorch.attend):
            loss = cross_entropy(model(ids, places).flatten(0, 1), labels.flatten())
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        return float(mean) / size

    return run


_ring: Any = _attention


class _RingOfTorch(torch.autograd.Function):
    """PyTorch's loop with the kernel that it has for CPUs."""

    @staticmethod
    def attend(q: Any, k: Any, v: Any, *, is_causal: bool) -> Any:
        return _RingOfTorch.apply(q, k, v)

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        op: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = _ring._templated_ring_attention(dist.group.WORLD, 2, op, q, k, v, is_causal=True)[:2]
        ctx.save_for_backward(q, k, v, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        op: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return _ring._templated_ring_attention_backward(
            *(dist.group.WORLD, 2, op, gradients[0].contiguous(), "grad_out", *ctx.saved_tensors, True), dropout_p=0.0
        )[:3]


def saved_bytes(run: Callable[[], object], model: nn.Module) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(kept.values())


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the most bytes that PyTorch has allocated at once in a step, besides what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    profiler: Any = profile.profiler
    events = [each for each in profiler.kineto_results.events() if each.name() == "[memory]"]
    held = peak = 0
    for each in sorted(events, key=lambda event: event.start_ns()):
        held += each.nbytes()
        peak = max(peak, held)
    return peak


def main(output: str, repetitions: int, tokens: int, exchanges: str = "ring") -> None:
    """Measure, and write memory, and medians if there are repetitions.

    Args:
        output: file to write.
        repetitions: 0: memory of the ring alone.
        tokens: of the sequence.
        exchanges: names, "ring+gather+ulysses"; the first is that of which memory is measured.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ud.init()
    whole = build(tokens)
    alone = step(whole, torch.optim.SGD(whole.parameters(), lr=0.01), tokens)
    variants: dict[str, Callable[[], object]] = {
        "every rank alone": alone
    }  # both processors are busy, as in the others
    found: dict[str, float] = {}
    if ud.rank() == 0 and repetitions:
        torch.set_num_threads(2)  # the other rank waits
        found["one process, saved MB"] = saved_bytes(forward(whole, tokens), whole) / 1e6
        found["one process, peak MB"] = peak_bytes(alone) / 1e6
        torch.set_num_threads(1)
    dist.barrier()
    names = exchanges.split("+")
    for exchange in names:
        model = build(tokens)
        line = f"context={ud.size()}:exchange={exchange}"
        model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01), line)
        variants[exchange] = step(model, optimizer, tokens)
        if exchange == names[0]:
            variants[exchange]()  # what is allocated once is there
            found[f"{exchange}, saved MB"] = saved_bytes(forward(model, tokens), model) / 1e6
            found[f"{exchange}, peak MB"] = peak_bytes(variants[exchange]) / 1e6
    medians: dict[str, float] = {}
    if repetitions:
        variants["PyTorch's ring over gloo"] = peer = step_of_torch(tokens)
        peer()  # the others have run: a step takes seconds
        medians = side_by_side(variants, gloo_meeting(), repetitions=repetitions, warmup=0)
    if ud.rank() == 0:
        Path(output).write_text(json.dumps({**medians, **found}))
    ud.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:5])
