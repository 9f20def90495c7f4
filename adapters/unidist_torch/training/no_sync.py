"""`model.no_sync()`, for scripts that know it from `DistributedDataParallel`."""

from __future__ import annotations

import functools
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class NoSync:
    """The method `no_sync` of a distributed model. Copies and pickles of the model are plain: theirs does nothing.

    Args:
        optimizer: the bound optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    def __call__(self) -> AbstractContextManager[None]:
        """See `DistributedOptimizerMixin.no_sync`."""
        optimizer: Any = self._optimizer()
        made: AbstractContextManager[None] = nullcontext() if optimizer is None else optimizer.no_sync()
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to what needs no unidist to be loaded."""
        return functools.partial, (nullcontext,)


def add_no_sync(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give a model the method `no_sync`, unless its class has one."""
    if not hasattr(type(model), "no_sync"):
        model.__dict__["no_sync"] = NoSync(optimizer)
