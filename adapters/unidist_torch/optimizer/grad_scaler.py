"""The inner step under torch's GradScaler, which leaves the check for overflow to `step` if that takes it."""

from __future__ import annotations

from typing import Any

import torch

from unidist_torch.models.guarded_parameter import plain_use


def scaled_step(plain: type[torch.optim.Optimizer], optimizer: torch.optim.Optimizer, grad_scaler: Any) -> Any:
    """Do the step of class `plain`, with unscaled gradients, unless one has overflowed; returns what it returns.

    Args:
        plain: the optimizer's class before it was bound.
        optimizer: the optimizer.
        grad_scaler: torch's GradScaler, or None.
    """
    if grad_scaler is None:
        with plain_use():
            return plain.step(optimizer)
    unscale(optimizer, grad_scaler)
    state = grad_scaler._per_optimizer_states[id(optimizer)]
    if any(found.item() for found in state["found_inf_per_device"].values()):
        return None
    with plain_use():
        return plain.step(optimizer)


def unscale(optimizer: torch.optim.Optimizer, grad_scaler: Any) -> None:
    """Unscale the gradients, and look for overflows in them, unless the script has done so."""
    if grad_scaler._per_optimizer_states[id(optimizer)]["stage"].name == "READY":
        grad_scaler.unscale_(optimizer)
