"""Entries that unidist adds to an optimizer's saved state: number of updates, loss scale, state of strategies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unidist.checkpoint import UpdateState
from unidist_torch.checkpoint import TorchStates


def updates_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Return plain values for each optimizer, equal on every rank; {} for one that is not distributed."""
    updates = [TorchStates().update(optimizer) for optimizer in optimizers]
    return [{} if update is None else UpdateState(update).values() for update in updates]


def make_equal(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Make parameters and state equal on all ranks, where they differ between two synchronizations. Collective."""
    for optimizer in optimizers:
        update = TorchStates().update(optimizer)
        if update is not None:
            update.before_save()


def load_updates(optimizers: Sequence[torch.optim.Optimizer], saved: Sequence[dict[str, Any]]) -> None:
    """Restore what `updates_of` has returned, in a job of any size; nothing for a checkpoint without it."""
    for optimizer, values in zip(optimizers, saved, strict=False):
        update = TorchStates().update(optimizer)
        if update is not None and values:
            UpdateState(update).load_values(values)
