"""Runs operations of PyTorch on two ranks, and records which functions they call on the thread of the script."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from tools.walks.counting import Call, inside, until
from unidist.jobs.pool import RankPool

Calls = list[Call]

WARM_UP = 5
REPEATS = 20
LAYERS = 16
FLOATS = 1024
"""Of the tensor that is reduced, and of each gradient: 4 KB."""


def record_walks() -> dict[str, tuple[Calls, int]]:
    """Return the calls of each walk on rank 0, by its name, and of how many operations they are.

    The walk of a gradient begins in the hook that autograd calls, and ends where its bucket is posted. That of a step
    begins where the reduced gradients are there.
    """
    with RankPool(2, engine="shm", env={"OMP_NUM_THREADS": "1"}) as pool:
        walks: dict[str, tuple[Calls, int]] = pool.run(_walks)[0]
    return walks


def _walks() -> dict[str, tuple[Calls, int]]:
    import torch

    import unidist.torch as ud

    ud.init()
    try:
        tensor = torch.ones(FLOATS)
        reduced = [_recorded(lambda: ud.allreduce(tensor, name="walk")) for _ in range(WARM_UP + REPEATS)]
        backwards, steps = [], []
        layers = [torch.nn.Linear(FLOATS, 1, bias=False) for _ in range(LAYERS)]
        model = torch.nn.ModuleList(layers)
        optimizer = ud.distribute(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            strategy=f"data:bucket_mb={4 * FLOATS * LAYERS / 4 / 2**20}",
        )[1]
        for _ in range(WARM_UP + REPEATS):
            optimizer.zero_grad()
            loss = torch.stack([layer(tensor) for layer in layers]).sum()
            backwards.append(_recorded(loss.backward))
            steps.append(_recorded(optimizer.step))
        return {
            "all-reduce by name": (_shortest(reduced), 1),
            "gradient": (until(inside(_shortest(backwards), "hook"), "_post"), LAYERS),
            "step": (_shortest(steps), 1),
        }
    finally:
        ud.shutdown()


def _shortest(found: list[Calls]) -> Calls:
    """Return the one without waits for the other rank, which look at the clock now and then."""
    return min(found[WARM_UP:], key=len)


def _recorded(operation: Callable[[], Any]) -> Calls:
    """Return file and name of each function that is called on this thread until the operation has returned."""
    calls: Calls = []
    depth = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal depth
        if event == "call":
            depth += 1
            calls.append(Call(frame.f_code.co_filename, frame.f_code.co_name, depth))
        elif event == "return":
            depth -= 1

    sys.setprofile(note)
    try:
        operation()
    finally:
        sys.setprofile(None)
    return calls
