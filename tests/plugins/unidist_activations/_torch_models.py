"""Models in PyTorch for the tests of the strategy, and what one training of them gives. Imported by ranks too."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import unidist.torch as ud

WIDTH, CLASSES, STEPS, BATCH = 8, 3, 6, 12


class Block(torch.nn.Module):
    """Everything that a second forward pass could get wrong: dropout, a batch norm, a keyword, two outputs."""

    def __init__(self, width: int, *, dropout: float) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, 4 * width)
        self.norm = torch.nn.BatchNorm1d(4 * width)
        self.dropout = torch.nn.Dropout(dropout)
        self.second = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, *, scale: float) -> tuple[torch.Tensor, int]:
        """Return `x` and something added to it, and what is no tensor."""
        return x + scale * self.second(self.dropout(torch.tanh(self.norm(self.first(x))))), 1


class Model(torch.nn.Module):
    """Three blocks; the last one is used twice."""

    def __init__(self, width: int = WIDTH, *, dropout: float = 0.5) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width, dropout=dropout) for _ in range(3))
        self.head = torch.nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        for block in (*self.blocks, self.blocks[-1]):
            x, _ = block(x, scale=0.7)
        return self.head(x)


def make(width: int = WIDTH, *, dropout: float = 0.5, dtype: torch.dtype = torch.float64) -> Model:
    """Return the model, always with the same weights."""
    torch.manual_seed(0)
    return Model(width, dropout=dropout).to(dtype)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return features and labels of all steps and ranks."""
    rng = np.random.default_rng(3)
    features = rng.standard_normal((STEPS * BATCH, WIDTH))
    return torch.from_numpy(features), torch.from_numpy(rng.integers(0, CLASSES, STEPS * BATCH))


def train_on_rank(strategy: str, *, passes: int, exact: bool) -> dict[str, Any]:
    """Train on this rank's samples with a strategy, from `init` to `shutdown`; see `train`."""
    ud.init()
    try:
        return train(strategy, passes=passes, exact=exact, rank=ud.rank(), size=ud.size())
    finally:
        ud.shutdown()


def train(strategy: str | None, *, passes: int, exact: bool, rank: int = 0, size: int = 1) -> dict[str, Any]:
    """Return the state of the model after training.

    Args:
        strategy: for `distribute`; None: without unidist.
        passes: backward passes that make one update.
        exact: no dropout, and batch norms use their statistics: the number of ranks makes no difference.
        rank: whose samples.
        size: number of ranks.
    """
    model: Any = make(dropout=0.0 if exact else 0.5)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if strategy is not None:
        model, optimizer = ud.distribute(model, optimizer, strategy)
    if exact:
        for block in model.blocks:
            block.norm.eval()
    features, labels = data()
    each = BATCH // (size * passes)
    torch.manual_seed(17 + rank)
    for step in range(STEPS):
        for part in range(passes):
            start = step * BATCH + (part * size + rank) * each
            share = slice(start, start + each)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(features[share]), labels[share]).backward()
            optimizer.step()
    return {name: value.detach().clone().numpy() for name, value in model.state_dict().items()}
