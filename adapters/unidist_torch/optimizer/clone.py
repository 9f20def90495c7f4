"""An optimizer of the same class and options for other tensors, without a call of its constructor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

_OWN = ("state", "param_groups", "step", "_unidist")  # "step": what a scheduler has put over the class's
_HOOKS = ("_hook_for_profile", "_optimizer_", "_warned_capturable_if_run_uncaptured")


def clone_for(
    optimizer: torch.optim.Optimizer, plain: type[torch.optim.Optimizer], params: Sequence[Sequence[torch.Tensor]]
) -> Any:
    """Return an optimizer of class `plain` with the options and attributes of another one, and no state.

    Args:
        optimizer: whose options.
        plain: its class, before it was bound.
        params: the new optimizer's tensors, for each of the optimizer's groups. Any leaves; they may be none.
    """
    clone: Any = plain.__new__(plain)
    for name, value in optimizer.__dict__.items():
        if name not in _OWN and not name.startswith(_HOOKS):
            clone.__dict__[name] = value.copy() if isinstance(value, dict | list | set) else value
    groups = [
        {**options_of(group), "params": list(tensors)}
        for group, tensors in zip(optimizer.param_groups, params, strict=True)
    ]
    clone.__setstate__({"state": defaultdict(dict), "param_groups": groups})
    return clone


def optimizers_within(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the classes of optimizers that are attributes of another one, alone or in containers.

    They have parameters of their own, so a clone of the outer one would step on those.
    """
    found: list[str] = []
    for value in vars(optimizer).values():
        entries = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
        found += [type(entry).__name__ for entry in entries if isinstance(entry, torch.optim.Optimizer)]
    return found


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return all of a parameter group but its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}
