"""Optimizers that hold others and leave the step to them: Muon for matrices and AdamW for the rest, as one.

They are taken for one optimizer if their `param_groups` are those of the optimizers within, the same dicts in the same
order, and if these keep all of the state. Then options, state and clones are those of the optimizers within.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from unidist.errors import UsageError

__all__ = ["check_composed", "parts_of", "shares_groups", "sharing_groups"]


def parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that are attributes of another one, alone or in a list, tuple or dict; most have none."""
    found = {id(each): each for value in vars(optimizer).values() for each in _optimizers_in(value)}
    return list(found.values())


def check_composed(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if an optimizer holds others, and cannot be taken for one optimizer; see the module's text."""
    parts = parts_of(optimizer)
    if not parts:
        return
    if shares_groups(optimizer):
        if not any(state and not _is_theirs(parameter, state, parts) for parameter, state in _state_of(optimizer)):
            return
        problem = "keeps state beside theirs"
    else:
        problem = "has param_groups that are not theirs, the same dicts in the same order"
    names = ", ".join(type(part).__name__ for part in parts)
    raise UsageError(
        f"{type(optimizer).__name__} leaves the step to optimizers within it ({names}), and {problem}: its parameters "
        "cannot be sharded or gathered, nor its state saved. Let param_groups be [group for optimizer in optimizers "
        "for group in optimizer.param_groups], distribute each of them by itself, or use one class with a flag for "
        "each group"
    )


@contextmanager
def sharing_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let the groups of a composed optimizer be those of its parts again, after these have loaded other ones.

    A learning-rate schedule of the composed one changes only what it has.
    """
    shared = shares_groups(optimizer)
    yield
    if shared and "param_groups" in vars(optimizer):  # some classes look them up themselves
        optimizer.param_groups = [group for part in parts_of(optimizer) for group in part.param_groups]


def shares_groups(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer holds others whose groups are its own."""
    groups = [group for part in parts_of(optimizer) for group in part.param_groups]
    return bool(groups) and len(groups) == len(optimizer.param_groups) and all(map(_is, groups, optimizer.param_groups))


def _state_of(optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, Any]]:
    return list(getattr(optimizer, "state", {}).items())


def _is_theirs(parameter: torch.Tensor, state: Any, parts: Sequence[torch.optim.Optimizer]) -> bool:
    """Return whether state is that of one of the parts: some classes give it as their own."""
    return any(part.state.get(parameter) is state for part in parts)


def _is(one: object, other: object) -> bool:
    return one is other


def _optimizers_in(value: Any) -> Iterator[torch.optim.Optimizer]:
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
    return (entry for entry in entries if isinstance(entry, torch.optim.Optimizer))
