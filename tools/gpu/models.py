"""What the checks train: a small network, its batches, and the numbers of one process."""

from __future__ import annotations

from typing import Any

import torch

import unidist.torch as ud
from unidist_zero import gathered

FEATURES, OUTPUTS, ROWS = 32, 8, 8


class Block(torch.nn.Module):
    """A residual block, as transformers have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `(..., width)`, as it takes them."""
        found: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return found


class Network(torch.nn.Module):
    """Blocks between two linear layers.

    Args:
        width: of the blocks.
        depth: number of blocks.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.into = torch.nn.Linear(FEATURES, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(depth))
        self.out = torch.nn.Linear(width, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `(rows, OUTPUTS)` of `(rows, FEATURES)`."""
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.out(x)
        return found


def network(device: torch.device, dtype: torch.dtype, *, width: int = 64, depth: int = 3) -> Network:
    """Return a network with the same values in every process."""
    torch.manual_seed(0)
    return Network(width, depth).to(dtype).to(device)


def batch(step: int, rows: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of one step, of all ranks together."""
    made = torch.Generator().manual_seed(100 + step)
    x = torch.randn(rows, FEATURES, generator=made, dtype=torch.float64)
    y = torch.randn(rows, OUTPUTS, generator=made, dtype=torch.float64)
    return x.to(dtype).to(device), y.to(dtype).to(device)


def train(
    strategy: str | None, device: torch.device, dtype: torch.dtype, *, steps: int, delay_cycles: int = 0
) -> list[torch.Tensor]:
    """Train, and return the parameters on the host, in float64.

    Args:
        strategy: of all ranks, each with its rows of a batch; None: one process alone, with all rows.
        device: to train on.
        dtype: of the parameters.
        steps: number of updates.
        delay_cycles: so long the device sleeps before each gradient: a wait that is missing shows then.
    """
    model: Any = network(device, dtype)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    total, own = ROWS * ud.size(), slice(None)
    if strategy is not None:
        model, optimizer = ud.distribute(model, optimizer, strategy)
        own = slice(ROWS * ud.rank(), ROWS * (ud.rank() + 1))
    if delay_cycles:
        for parameter in model.parameters():
            parameter.register_hook(_sleeping(delay_cycles))
    for step in range(steps):
        x, y = batch(step, total, device, dtype)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[own]), y[own]).backward()
        optimizer.step()
    if strategy is not None and "zero=3" in strategy:
        with gathered(model):
            return _on_host(model)
    return _on_host(model)


def _sleeping(cycles: int) -> Any:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(cycles)
        return gradient

    return hook


def _on_host(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().cpu().double().clone() for parameter in model.parameters()]
