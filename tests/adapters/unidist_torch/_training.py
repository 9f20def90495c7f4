"""Small trainings that run on the ranks of a pool; imported there too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import unidist.torch as ud

STEPS, BATCH, FEATURES, CLASSES = 10, 12, 6, 3


@contextmanager
def runtime() -> Iterator[None]:
    """A fresh runtime around a test's work."""
    ud.init()
    try:
        yield
    finally:
        ud.shutdown()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """The same batches on every rank and in the reference."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(STEPS, BATCH, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (STEPS, BATCH), generator=generator)


def network() -> nn.Module:
    """The same parameters wherever it is called."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy."""
    return nn.functional.cross_entropy(model(x), y)


def share(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Rank's rows of a batch that divides."""
    rows = tensor.shape[0] // size
    return tensor[rank * rows : (rank + 1) * rows]


def values(model: nn.Module) -> list[Any]:
    """Every parameter's values."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def alone(
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    make_model: Callable[[], nn.Module] = network,
    loss: Callable[..., torch.Tensor] = loss_of,
    before_step: Callable[[nn.Module], object] = lambda model: None,
) -> list[torch.Tensor]:
    """Train one process on the whole batches: what every rank must come to."""
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    for x, y in zip(*data(), strict=True):
        optimizer.zero_grad()
        loss(model, x, y).backward()
        before_step(model)
        optimizer.step()
    return values(model)


def assert_close(found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float = 1e-12) -> None:
    """Compare all parameters."""
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
