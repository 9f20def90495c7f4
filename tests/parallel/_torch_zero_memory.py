"""How much memory of the machine the ranks of a training take, beside what they took before."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path
from typing import Any

import torch

import unidist.torch as ud
from unidist.environment import set_variables

WIDTH, LAYERS = 2048, 24
NUM_PARAMETERS = LAYERS * WIDTH * WIDTH


def resident_bytes() -> int:
    """Return this process's part of the machine's memory; memory that several processes map counts in equal parts.

    What was freed and kept by the C library for the next step goes back to the system before.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    ud.barrier()
    found = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    ud.barrier()
    return int(found.group(1)) * 1024


def bytes_per_parameter(strategy: str) -> tuple[float, float]:
    """Train a network in mixed precision; returns what a rank holds between two updates, and within a forward.

    In bytes per parameter, the mean over the ranks.
    """
    torch.set_num_threads(1)
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            return _measure()
        finally:
            ud.shutdown()


def _measure() -> tuple[float, float]:
    _train(torch.nn.Linear(8, 8).bfloat16())  # PyTorch loads much of itself when first used
    before = resident_bytes()
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer = ud.distribute(model, optimizer)
    within: list[int] = []
    for number in range(3):
        if number == 2:
            model[LAYERS // 2].register_forward_pre_hook(lambda *args: within.append(resident_bytes()))
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH)).float().square().mean().backward()
        optimizer.step()
    found = torch.tensor([resident_bytes() - before, within[0] - before], dtype=torch.float64) / NUM_PARAMETERS
    between, forward = ud.allreduce(found, name="bytes").tolist()
    return between, forward


def _train(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
