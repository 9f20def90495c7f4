"""The ways in which PyTorch calls a process group: with lists of one tensor or the tensor, with options or without."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unidist.errors import UsageError


def one(tensors: Any, what: str) -> torch.Tensor:
    """Return the tensor of a call that takes a list of one, or the tensor itself."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise UsageError(f"{what} by backend unidist: one tensor a call, not {len(tensors)}")
    found: torch.Tensor = tensors[0]
    return found


def one_list(tensors: Any, what: str) -> list[torch.Tensor]:
    """Return the list of tensors of a call that takes a list of one list, or the list itself."""
    if len(tensors) and isinstance(tensors[0], torch.Tensor):
        return list(tensors)
    if len(tensors) != 1:
        raise UsageError(f"{what} by backend unidist: one list of tensors a call, not {len(tensors)}")
    return list(tensors[0])


def one_for_each_rank(tensors: Sequence[torch.Tensor], size: int, what: str, role: str) -> None:
    """Raise UsageError unless there are `size` tensors; `role` is "input" or "output"."""
    if len(tensors) != size:
        raise UsageError(f"{what} by backend unidist: {len(tensors)} {role} tensors for {size} ranks")


def options(given: Any, kind: type[Any], *, timeout: timedelta | None = None, **defaults: Any) -> Any:
    """Return PyTorch's options of a call: those that were given, or new ones."""
    if given is not None and isinstance(given, kind):
        return given
    made = kind()
    for name, value in defaults.items():
        setattr(made, name, value)
    if isinstance(given, int) and hasattr(made, "rootRank"):  # broadcast(tensor, root)
        made.rootRank = given
    if timeout is not None:
        made.timeout = timeout
    return made


def reduce_options(given: Any, kind: type[Any], timeout: timedelta | None = None, **defaults: Any) -> Any:
    """Return PyTorch's options of a reduction, which may also be called with the operation alone."""
    if isinstance(given, dist.ReduceOp | dist.ReduceOp.RedOpType):
        made = options(None, kind, timeout=timeout, **defaults)
        made.reduceOp = given
        return made
    if given is not None and not isinstance(given, kind) and hasattr(given, "reduceOp"):
        return given  # options of another reduction, as AllreduceOptions for a coalesced one
    return options(given, kind, timeout=timeout, **defaults)
