"""The inner step under torch's GradScaler, which leaves the check for overflow to `step` if that takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unidist_torch.models.guarded_parameter import plain_use


def scaled_step(
    step: Callable[[torch.optim.Optimizer], Any], optimizer: torch.optim.Optimizer, grad_scaler: Any
) -> Any:
    """Do a step, with unscaled gradients, unless one has overflowed; returns what it returns.

    Args:
        step: of the optimizer's class before it was bound, or in its place.
        optimizer: the optimizer.
        grad_scaler: torch's GradScaler, or None.
    """
    if grad_scaler is None:
        with plain_use():
            return step(optimizer)
    unscale(optimizer, grad_scaler)
    state = grad_scaler._per_optimizer_states[id(optimizer)]
    if any(found.item() for found in state["found_inf_per_device"].values()):
        return None
    with plain_use():
        return step(optimizer)


def unscale(optimizer: torch.optim.Optimizer, grad_scaler: Any) -> None:
    """Unscale the gradients, and look for overflows in them, unless the script has done so."""
    if grad_scaler._per_optimizer_states[id(optimizer)]["stage"].name == "READY":
        grad_scaler.unscale_(optimizer)
