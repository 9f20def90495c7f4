"""An optimizer of the same class and options for other tensors, without a call of its constructor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from unidist_torch.composed import parts_of

_OWN = ("state", "param_groups", "step", "_unidist")  # "step": what a scheduler has put over the class's
_HOOKS = ("_hook_for_profile", "_optimizer_", "_warned_capturable_if_run_uncaptured")


def clone_for(
    optimizer: torch.optim.Optimizer, plain: type[torch.optim.Optimizer], params: Sequence[Sequence[torch.Tensor]]
) -> Any:
    """Return an optimizer of class `plain` with the options and attributes of another one, and no state.

    Optimizers within it are cloned as well.

    Args:
        optimizer: whose options.
        plain: its class, before it was bound.
        params: the new optimizer's tensors, for each of the optimizer's groups. Any leaves; they may be none.
    """
    clone: Any = plain.__new__(plain)
    rest = list(params)
    parts: dict[int, Any] = {}
    for part in parts_of(optimizer):
        own, rest = rest[: len(part.param_groups)], rest[len(part.param_groups) :]
        parts[id(part)] = clone_for(part, type(part), own)

    def copied(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: parts.get(id(each), each) for name, each in value.items()}
        if isinstance(value, list | tuple) and any(id(each) in parts for each in value):
            return type(value)(parts.get(id(each), each) for each in value)
        return value.copy() if isinstance(value, list | set) else parts.get(id(value), value)

    for name, value in optimizer.__dict__.items():
        if name not in _OWN and not name.startswith(_HOOKS):
            clone.__dict__[name] = copied(value)
    groups = [group for part in parts.values() for group in part.param_groups] or [
        {**options_of(group), "params": list(tensors)}
        for group, tensors in zip(optimizer.param_groups, params, strict=True)
    ]
    clone.__setstate__({"state": defaultdict(dict), "param_groups": groups})
    return clone


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return all of a parameter group but its parameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}
