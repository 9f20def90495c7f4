"""`model.no_sync()`, for scripts that know it from `DistributedDataParallel`."""

from __future__ import annotations

import functools
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from unidist_torch.models.plain_pickles import leave_out

_NAME = "no_sync"


class NoSync:
    """The method `no_sync` of a distributed model.

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
        """Reduce to what needs no unidist to be loaded, for models whose class decides what is pickled."""
        return functools.partial, (nullcontext,)


def add_no_sync(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give a model the method `no_sync`, unless its class has one."""
    if hasattr(type(model), _NAME):
        return
    model.__dict__[_NAME] = NoSync(optimizer)
    leave_out(model, _without_no_sync, copies=True)


def _without_no_sync(state: dict[str, Any]) -> None:
    state.pop(_NAME, None)
