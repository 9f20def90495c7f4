"""Training in float64 on batches that do not depend on the number of ranks, for clusters that run functions."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

BATCH = 12  # divisible by 1, 2, 3 and 4 ranks
Weights = list[list[float]]


def train(num_steps: int, *, folder: str = "", resume: bool = False, strategy: str | None = None) -> Weights:
    """Train on this rank's share of each batch, save, and return the weights; `resume` goes on from what was saved."""
    import unidist.torch as ud

    ud.init()
    model, optimizer = _model()
    model, optimizer = ud.distribute(model, optimizer, strategy=strategy)
    first = 0
    if resume:
        first = ud.load(folder, model, optimizer).step or 0
    _steps(model, optimizer, range(first, first + num_steps), ud.data_rank(), ud.data_size())
    if folder:
        ud.save(folder, model, optimizer, step=first + num_steps)
    weights = _weights(model)
    ud.shutdown()
    return weights


def alone(num_steps: int, *, share: int = 1) -> Weights:
    """Return the weights of one process without unidist, on the first of `share` shares of each batch."""
    model, optimizer = _model()
    _steps(model, optimizer, range(num_steps), 0, share)
    return _weights(model)


def assert_equal_to_one_process(found: Sequence[Weights], num_steps: int) -> None:
    """Check the weights of all ranks; and that those of a rank that had exchanged nothing would not do."""
    expected = alone(num_steps)
    for weights in found:
        assert _difference(weights, expected) < 1e-12
    if len(found) > 1:
        assert _difference(alone(num_steps, share=len(found)), expected) > 1e-4


def train_and_kill(num_steps: int, *, folder: str, rank: int, at: int) -> Weights:
    """Train with a checkpoint after each step, from the last one on; once, a rank kills itself after step `at`."""
    import unidist.torch as ud

    ud.init()
    model, optimizer = _model()
    model, optimizer = ud.distribute(model, optimizer)
    first = 0
    if os.path.isdir(folder):
        first = ud.load(folder, model, optimizer).step or 0
    for step in range(first, num_steps):
        _steps(model, optimizer, [step], ud.data_rank(), ud.data_size())
        ud.save(folder, model, optimizer, step=step + 1)
        ud.barrier()
        if step + 1 == at and ud.rank() == rank and not os.path.exists(f"{folder}.killed"):
            with open(f"{folder}.killed", "x"):
                os.kill(os.getpid(), 9)
    return _weights(model)


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def _steps(model: Any, optimizer: Any, steps: Sequence[int] | range, part: int, num_parts: int) -> None:
    for step in steps:
        random = torch.Generator().manual_seed(step)
        inputs = torch.randn(BATCH, 6, dtype=torch.float64, generator=random)
        targets = torch.randn(BATCH, 3, dtype=torch.float64, generator=random)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[part::num_parts]), targets[part::num_parts]).backward()
        optimizer.step()


def _weights(model: nn.Module) -> Weights:
    return [copy.deepcopy(value.detach().flatten().tolist()) for value in model.state_dict().values()]


def _difference(found: Weights, expected: Weights) -> float:
    return max(abs(a - b) for row, other in zip(found, expected, strict=True) for a, b in zip(row, other, strict=True))
