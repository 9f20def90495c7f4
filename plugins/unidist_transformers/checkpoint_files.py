"""The files of a checkpoint of the Trainer that hold the optimizer: transformers' own, and unidist's beside them.

`optimizer.pt` is whole and transformers' own. Where ranks hold parts of the model (`tensor=N`) there is none, but a
folder that `ud.save` writes, to which each rank adds its part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import unidist.torch as ud
from unidist.checkpoint import UpdateState
from unidist.strategy import Plan
from unidist_torch.checkpoint import TorchStates

OPTIMIZER = "optimizer.pt"
SCHEDULER = "scheduler.pt"
UPDATE = "unidist_update.pt"
FOLDER = "unidist"


def save_optimizer(folder: Path, plan: Plan, model: Any, optimizer: Any, *, is_writer: bool) -> None:
    """Save the state of a distributed optimizer. Collective.

    Args:
        folder: the checkpoint.
        plan: of the run.
        model: distributed.
        optimizer: its own.
        is_writer: this rank writes what is whole.
    """
    if plan.model_axes:
        ud.save(folder / FOLDER, model, optimizer)
        return
    state = optimizer.state_dict()
    update = TorchStates().update(optimizer)
    values = {} if update is None else UpdateState(update).values()
    if is_writer:
        torch.save(state, folder / OPTIMIZER)
        torch.save(values, folder / UPDATE)


def load_before(folder: Path, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    """Load whole state into an optimizer that is not distributed yet, whose state will be cut with the model."""
    if plan.model_axes and (folder / OPTIMIZER).exists():
        optimizer.load_state_dict(torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True))


def load_optimizer(folder: Path, plan: Plan, model: Any, optimizer: Any) -> None:
    """Load the state of a distributed optimizer, in a job of any size; nothing for a checkpoint without it."""
    if (folder / FOLDER).exists():
        ud.load(folder / FOLDER, model, optimizer)
        return
    if (folder / OPTIMIZER).exists():
        state = torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True)
        if not plan.model_axes:
            optimizer.load_state_dict(state)
        else:  # a scheduler that was made after `load_before` has set the learning rate
            for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
                group.update({name: value for name, value in saved.items() if name != "params"})
    update = TorchStates().update(optimizer)
    if update is not None and (folder / UPDATE).exists():
        UpdateState(update).load_values(torch.load(folder / UPDATE, weights_only=True))
