"""The training of `_zero_memory` in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from _zero_memory import LAYERS, WIDTH, resident_bytes

import unidist.torch as ud


def warm_up() -> None:
    """See `Backend.warm_up`."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 8).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()


def train(within: list[int]) -> object:
    """See `Backend.train`."""
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer = ud.distribute(model, optimizer)
    for number in range(3):
        if number == 2:
            model[LAYERS // 2].register_forward_pre_hook(lambda *args: within.append(resident_bytes(ud)))
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH)).float().square().mean().backward()
        optimizer.step()
    return model, optimizer
