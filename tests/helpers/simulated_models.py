"""Models for trainings on simulated devices whose ranks have parts of one model, or of a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from simulated_training import STEPS, WIDTH, Block, batches

from unidist_expert_parallel.torch import MixtureOfExperts

HEADS, SAMPLES, TOKENS = 2, 2, 6


class Attention(torch.nn.Module):
    """Causal self-attention beside a connection that skips it."""

    def __init__(self) -> None:
        super().__init__()
        self.into = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.into(x).chunk(3, -1))
        found = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended: torch.Tensor = x + self.out(found.transpose(1, 2).flatten(2))
        return attended


class Experts(torch.nn.Module):
    """A mixture of experts beside a connection that skips it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = MixtureOfExperts(WIDTH, num_experts=4, top_k=2, hidden=WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        found: torch.Tensor = x + self.experts(x)
        return found


def dense(dtype: torch.dtype, seed: int) -> torch.nn.Module:
    """Return a model of equal blocks, the same for each seed: the ranks make one model."""
    return _made(lambda: torch.nn.Sequential(*(Block() for _ in range(4))), dtype)


def attending(dtype: torch.dtype, seed: int) -> torch.nn.Module:
    """Return a model with attention, likewise."""
    return _made(lambda: torch.nn.Sequential(Block(), Attention(), Block(), Attention()), dtype)


def mixing(dtype: torch.dtype, seed: int) -> torch.nn.Module:
    """Return a model with experts, likewise."""
    return _made(lambda: torch.nn.Sequential(Block(), Experts(), Block(), Experts()), dtype)


def same_batches(rank: int, dtype: torch.dtype, passes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the batches that all ranks compute together."""
    return batches(0, dtype, passes)


def sequences(rank: int, dtype: torch.dtype, passes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches of sequences, the same on all ranks."""
    generator = torch.Generator().manual_seed(17)
    shape = (STEPS * passes, 2, SAMPLES, TOKENS, WIDTH)
    return [(x, y) for x, y in torch.randn(shape, generator=generator, dtype=dtype)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer that does not divide by gradients that are zero but for rounding, as of a bias of keys."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _made(make: Callable[[], torch.nn.Module], dtype: torch.dtype) -> torch.nn.Module:
    assert threading.current_thread() is threading.main_thread(), "another rank may draw random numbers meanwhile"
    torch.manual_seed(0)
    return make().to(dtype)
