"""Scripts of which one rank leaves a step or a batch out, for `test_skipped_steps`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import unidist.torch as ud
from unidist.errors import UnidistError

STEPS = 6


@contextmanager
def _training(strategy: str) -> Iterator[tuple[Any, Any]]:
    ud.init()
    try:
        torch.manual_seed(0)
        model: Any = torch.nn.Linear(4, 2)
        yield ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    finally:
        ud.shutdown()


def ends(strategy: str, skip: str) -> tuple[str, str]:
    """Train, on rank 1 with something left out; return the kind and the text of the error."""
    with _training(strategy) as (model, optimizer):
        try:
            for step, x in enumerate(_batches()):
                if skip != "batch":
                    optimizer.zero_grad()
                if ud.rank() == 1 and step == 3 and skip != "nothing":
                    continue
                model(x).square().mean().backward()
                optimizer.step()
                if skip == "batch":
                    model.zero_grad()
        except UnidistError as error:
            return type(error).__name__, str(error)
        return "", ""


def _batches() -> Iterator[torch.Tensor]:
    samples = torch.randn(4 * STEPS, 4, generator=torch.Generator().manual_seed(1))
    dataset: Any = torch.utils.data.TensorDataset(samples)
    for (x,) in ud.shard(torch.utils.data.DataLoader(dataset, batch_size=2)):
        yield x


def uneven(strategy: str, kind: type[Exception] | None = None) -> tuple[str, str]:
    """Train with two batches less on rank 1, and without `join`.

    Args:
        strategy: to train with.
        kind: of the exception with which rank 1 ends; None: without one.
    """
    try:
        with _training(strategy) as (model, optimizer):
            for _ in range(STEPS - 2 * ud.rank()):
                model(torch.ones(2, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if kind is not None:
                raise kind("no more")
    except (UnidistError, ValueError, StopIteration) as error:
        return type(error).__name__, str(error)
    return "", ""
