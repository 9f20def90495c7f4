"""Gradients of gradients in PyTorch on the ranks of a pool, each training beside one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from _torch_experts import compared
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import unidist.torch as ud
from unidist.settings.environment import set_variables
from unidist_expert_parallel.torch import MixtureOfExperts
from unidist_zero import gathered

BATCH, TOKENS, WIDTH, HEADS, STEPS = 8, 5, 8, 4, 3


class Attention(nn.Module):
    """Self-attention of tokens, written by hand, so that all of it has gradients of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        batch, tokens, _ = x.shape
        q, k, v = (
            part.view(batch, tokens, -1, WIDTH // HEADS).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        weights = (q @ k.transpose(-2, -1) / 2.0).softmax(-1)
        return self.project((weights @ v).transpose(1, 2).reshape(batch, tokens, -1))


class Block(nn.Module):
    """A block of a transformer; the norm lets the gradient of a gradient reach what comes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend = Attention()
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        x = x + self.attend(self.first(x))
        return x + self.perceptron(self.second(x))


class Encoder(nn.Module):
    """PyTorch's own layer, with the attention that has gradients of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, 0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        with sdpa_kernel(SDPBackend.MATH):
            return self.layer(x)


class Experts(nn.Module):
    """A layer of experts; which one a token goes to has no gradient, how much of it comes back has."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.experts = nn.Linear(WIDTH, WIDTH), MixtureOfExperts(WIDTH, 4, hidden=12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return (batch, tokens, width)."""
        return self.experts(self.enter(x).tanh())


def perceptron() -> nn.Module:
    """Return a critic of a GAN."""
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "block": lambda: nn.Sequential(Block(), Block()),
    "encoder": lambda: nn.Sequential(Encoder(), Encoder()),
    "experts": lambda: nn.Sequential(Experts(), nn.Linear(WIDTH, 1)),
}


def made(model: str, strategy: str) -> nn.Module:
    """Return the model, the same on every rank; in float64, unless the strategy computes in 16 bits."""
    torch.manual_seed(3)
    return MODELS[model]().to(dtype_of(strategy))


def dtype_of(strategy: str) -> torch.dtype:
    """Return the type of parameters."""
    return torch.float32 if "precision" in strategy else torch.float64


def batches() -> torch.Tensor:
    """Return the samples of each step: `(STEPS, BATCH, TOKENS, WIDTH)`."""
    return torch.from_numpy(np.random.default_rng(5).standard_normal((STEPS, BATCH, TOKENS, WIDTH)))


def penalised(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return a loss with a gradient penalty (Gulrajani et al. 2017), a mean over the samples."""
    x = x.clone().requires_grad_()
    outputs = model(x)
    (gradient,) = torch.autograd.grad(outputs.square().sum(), x, create_graph=True)
    return outputs.mean() + 10.0 * (gradient.flatten(1).norm(dim=1) - 1.0).square().mean()


def train(model: nn.Module, optimizer: Any, shares: Sequence[torch.Tensor]) -> list[float]:
    """Train on the shares, and return the losses."""
    losses = []
    for share in shares:
        optimizer.zero_grad()
        loss = penalised(model, share)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def errors_of(cases: Sequence[tuple[str, str, str]]) -> list[float | str]:
    """Return of each case how far this rank's parameters are from those of one process, or what was raised.

    Args:
        cases: model, strategy and engine of each.
    """
    found: list[float | str] = []
    for name, strategy, engine in cases:
        alone, samples = made(name, strategy), batches().to(dtype_of(strategy))
        losses = train(alone, torch.optim.AdamW(alone.parameters(), lr=0.01, eps=1e-3), list(samples))
        expected = {key: value.detach().numpy() for key, value in alone.named_parameters()}
        with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": engine}):
            ud.init()
            try:
                model = made(name, strategy)
                model, optimizer = ud.distribute(model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3))
                rank, size = ud.data_rank(), ud.data_size()
                each = BATCH // size
                own = train(model, optimizer, [x[rank * each : (rank + 1) * each] for x in samples])
                with gathered(model) if "zero=3" in strategy else nullcontext():
                    error = compared(model, expected)
                found.append(max(error, *(abs(a - b) for a, b in zip(own, losses, strict=True) if size == 1), 0.0))
            except Exception as exc:
                found.append(f"{type(exc).__name__}: {exc}")
            finally:
                ud.shutdown()
    return found


def of_a_reduction(op: Any) -> float:
    """Return the gradient of a gradient of the cubes of a reduction, divided by the values, which are those of all."""
    ud.init()
    x = torch.linspace(0.5, 2.0, 4, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad((ud.allreduce(x, op=op) ** 3).sum(), x, create_graph=True)
    gradient.sum().backward()
    ud.shutdown()
    return float((x.grad / x.detach()).mean())
