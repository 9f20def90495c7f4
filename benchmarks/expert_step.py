"""A training step of 4 layers whose experts are divided over two ranks, beside one process and torch's all-to-all.

Run by `python -m benchmarks --only experts`, which starts it on two ranks. Each rank has its own tokens. The dense loop
is what libraries do in one process: a mask for each expert, here on the tokens of both ranks. The peer is written by
hand: `all_to_all_single` over gloo for counts and tokens, forward and backward, with the same products.
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
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

import unidist.torch as ud
from benchmarks.gloo_meeting import gloo_meeting
from unidist_bench import side_by_side
from unidist_expert_parallel.torch import MixtureOfExperts

LAYERS, WIDTH, HIDDEN, EXPERTS, TOP_K, TOKENS = 4, 256, 512, 8, 2, 1024
"""Tokens are those of one rank."""


class Dense(nn.Module):
    """All experts in one process, one after the other, each on the tokens that chose it."""

    def __init__(self, layer: MixtureOfExperts) -> None:
        super().__init__()
        self.router, self.experts = layer.router, layer.experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of `x`."""
        weights, index = self.router(x).softmax(-1).topk(TOP_K, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(x)
        for number in range(EXPERTS):
            tokens, choice = torch.where(index == number)
            found = expert(self.experts, number, x[tokens])
            result = result.index_add(0, tokens, found * weights[tokens, choice, None])
        return result


class Exchanged(torch.autograd.Function):
    """Rows to other ranks and from them, by torch.distributed."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Return the rows of all ranks."""
        ctx.splits = sent, received
        target = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(target, rows.contiguous(), received, sent)
        return target

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Return the gradients to the ranks of the rows."""
        sent, received = ctx.splits
        target = gradients[0].new_empty(sum(sent), gradients[0].shape[1])
        dist.all_to_all_single(target, gradients[0].contiguous(), sent, received)
        return target, None, None


class ByHand(nn.Module):
    """This rank's experts, and tokens that travel over gloo."""

    def __init__(self, layer: MixtureOfExperts) -> None:
        super().__init__()
        self.router, self.experts = layer.router, layer.experts
        self.each = EXPERTS // dist.get_world_size()
        self.experts.keep(dist.get_rank(), dist.get_world_size())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of `x`."""
        weights, index = self.router(x).softmax(-1).topk(TOP_K, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        flat = index.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=EXPERTS)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent, received = (each.view(-1, self.each).sum(1).tolist() for each in (counts, arriving))
        here: torch.Tensor = Exchanged.apply(x[order // TOP_K], sent, received)
        numbers = torch.arange(self.each).repeat(dist.get_world_size()).repeat_interleave(arriving)
        by_expert = numbers.argsort(stable=True)
        parts = here[by_expert].split(arriving.view(-1, self.each).sum(0).tolist())
        found = torch.cat([expert(self.experts, number, part) for number, part in enumerate(parts)])
        back: torch.Tensor = Exchanged.apply(found[by_expert.argsort()], received, sent)
        whole = torch.zeros(len(flat), WIDTH).index_copy(0, order, back).view(-1, TOP_K, WIDTH)
        return (whole * weights.unsqueeze(-1)).sum(1)


def expert(stack: Any, number: int, rows: torch.Tensor) -> torch.Tensor:
    """Return what one expert makes of rows."""
    gated = F.silu(F.linear(rows, stack.gate[number])) * F.linear(rows, stack.up[number])
    return F.linear(gated, stack.down[number])


class Residual(nn.Module):
    """Adds what a layer makes of normalized tokens to the tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of `x`."""
        return x + self.inner(self.norm(x))


def model(made_of: Callable[[MixtureOfExperts], nn.Module]) -> nn.Module:
    """Return the layers, with equal values on every rank, each made of one of ours."""
    torch.manual_seed(0)
    layers = [MixtureOfExperts(WIDTH, EXPERTS, hidden=HIDDEN, top_k=TOP_K) for _ in range(LAYERS)]
    return nn.Sequential(*(Residual(made_of(layer)) for layer in layers))


def step(layers: nn.Module, optimizer: Any, tokens: torch.Tensor, *, averages: bool = False) -> Callable[[], None]:
    """Return one training step on these tokens.

    Args:
        layers: the model.
        optimizer: of its parameters.
        tokens: `(tokens, width)`.
        averages: add up the gradients of what all ranks hold, over gloo.
    """
    targets = tokens.flip(0)
    shared = [each for name, each in layers.named_parameters() if ".experts." not in name]

    def run() -> None:
        F.mse_loss(layers(tokens), targets).backward()  # type: ignore[no-untyped-call]
        if averages:
            flat = torch.cat([each.grad.view(-1) for each in shared if each.grad is not None])
            dist.all_reduce(flat)
        optimizer.step()
        optimizer.zero_grad()

    return run


def sgd(layers: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer."""
    return torch.optim.SGD(layers.parameters(), lr=0.01)


def variants() -> dict[str, Callable[[], object]]:
    """Return what is measured. Collective."""
    torch.manual_seed(1)
    whole = torch.randn(TOKENS * ud.size(), WIDTH)
    own = whole[TOKENS * ud.rank() : TOKENS * (ud.rank() + 1)]
    dense, ours = model(Dense), model(lambda layer: layer)
    divided = model(lambda layer: layer)
    divided, optimizer = ud.distribute(divided, sgd(divided), f"expert={ud.size()}")
    theirs = model(ByHand)
    is_first = ud.rank() == 0
    return {
        "dense loop": step(dense, sgd(dense), whole) if is_first else lambda: None,
        "one process": step(ours, sgd(ours), whole) if is_first else lambda: None,
        "expert=2": step(divided, optimizer, own),
        "all-to-all over gloo": step(theirs, sgd(theirs), own, averages=True),
    }


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
