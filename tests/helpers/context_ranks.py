"""Ranks of the axis `context` as threads of one process, for tests of single operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unidist.communicator import Communicator
from unidist.testing.threads import ThreadWorld
from unidist.topology import Topology
from unidist_context_parallel._torch import rules
from unidist_context_parallel._torch.divided.axis import ContextAxis, take_rows
from unidist_context_parallel._torch.divided.tensor import SequenceTensor, whole
from unidist_context_parallel.layout.sequence import zigzag

assert rules.__all__, "importing them registers the rules"


class OneAxis:
    """As much of a runtime as the axis needs."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.topology = Topology(
            rank=communicator.rank,
            world_size=communicator.size,
            local_rank=communicator.rank,
            local_size=communicator.size,
        )

    def axis_rank(self, name: str) -> int:
        """Return this rank's place."""
        return self.communicator.rank

    def axis_size(self, name: str) -> int:
        """Return the number of ranks."""
        return self.communicator.size

    def new_communicator(self, axis: str, *, memory: str = "host") -> Communicator:
        """Return the only one."""
        return self.communicator


def on_ranks(size: int, function: Callable[[ContextAxis], Any]) -> list[Any]:
    """Return what a function returns on each rank."""

    def run(communicator: Communicator) -> Any:
        runtime: Any = OneAxis(communicator)
        return function(ContextAxis(runtime))

    with ThreadWorld(size) as world:
        return world.run(run)


def divided(x: torch.Tensor, dim: int, axis: ContextAxis, *, trains: bool = True) -> SequenceTensor:
    """Return a tensor as its ranks have it; its rows are a leaf."""
    layout = zigzag(x.shape[dim], axis.size)
    rows = take_rows(x, layout, dim, axis.rank).detach().clone()
    return SequenceTensor(rows.requires_grad_() if trains and rows.is_floating_point() else rows, dim, layout, axis)


def error_of(function: Callable[..., Any], inputs: dict[str, torch.Tensor], dims: dict[str, int], size: int) -> float:
    """Return how far results and gradients of a function are from those of one process.

    Args:
        function: takes the inputs by name; returns tensors.
        inputs: whole.
        dims: which of them are divided, and where.
        size: number of ranks.
    """
    plain = {
        name: value.clone().requires_grad_() if value.is_floating_point() else value for name, value in inputs.items()
    }
    expected = _listed(function(**plain))
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in expected]
    loss = sum(
        ((each * weight).sum() for each, weight in zip(expected, weights, strict=True) if each.is_floating_point()),
        torch.zeros((), dtype=torch.float64),
    )
    if loss.requires_grad:
        loss.backward()

    def rank(axis: ContextAxis) -> tuple[float, dict[str, torch.Tensor]]:
        given: dict[str, Any] = {
            name: divided(value, dims[name], axis)
            if name in dims
            else (value.clone().requires_grad_() if value.is_floating_point() else value)
            for name, value in inputs.items()
        }
        found = _listed(function(**given))
        assert len(found) == len(expected)
        error = 0.0
        total: Any = torch.zeros((), dtype=torch.float64)
        for one, other, weight in zip(found, expected, weights, strict=True):
            assert tuple(one.shape) == tuple(other.shape), (tuple(one.shape), tuple(other.shape))
            assert one.dtype == other.dtype
            values = whole(one).detach()
            assert torch.equal(values.isfinite(), other.isfinite())
            difference = (values.double() - other.detach().double()).nan_to_num(0.0, 0.0, 0.0).abs()
            error = max([error, *difference.flatten().tolist()])
            if one.is_floating_point():
                total = total + (one * weight).sum()
        if total.requires_grad:
            total.backward()
        gradients = {}
        for name, value in given.items():
            if not inputs[name].is_floating_point():
                continue
            leaf = value.local if isinstance(value, SequenceTensor) else value
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            if isinstance(value, SequenceTensor):
                gradient = axis.gather(gradient, value.rows, value.dim_divided) / axis.size
            else:
                gradient = axis.sum(gradient) / axis.size
            gradients[name] = gradient
        return error, gradients

    worst = 0.0
    for error, gradients in on_ranks(size, rank):
        worst = max(worst, error)
        for name, gradient in gradients.items():
            wanted = plain[name].grad
            wanted = torch.zeros_like(gradient) if wanted is None else wanted
            worst = max(worst, float((gradient - wanted).abs().max()) if gradient.numel() else 0.0)
    return worst


def _listed(found: Any) -> list[Any]:
    return [found] if isinstance(found, torch.Tensor) else list(found)
