"""`model.no_sync()`, for scripts that know it from `DistributedDataParallel`."""

from __future__ import annotations

import functools
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_NAME, _STATE = "no_sync", "__getstate__"


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


class _PlainState:
    """The method `__getstate__` of a distributed model. Copies and pickles of the model are plain: without this module.

    `torch.load` takes such a file with the safe globals of the plain model.

    Args:
        model: has it as an attribute.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self) -> Any:
        model: Any = self._model()
        kind: Any = type(model)
        state = kind.__getstate__(model)
        return {key: state[key] for key in state if key not in (_NAME, _STATE)} if isinstance(state, dict) else state


def add_no_sync(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give a model the method `no_sync`, unless its class has one."""
    if hasattr(type(model), _NAME):
        return
    model.__dict__[_NAME] = NoSync(optimizer)
    if _asks_for_state(type(model)):
        model.__dict__[_STATE] = _PlainState(model)


def _asks_for_state(kind: type[Any]) -> bool:
    """Say whether pickles of objects of a class, ours or one that does not define them, ask `__getstate__`."""
    method: Any = kind.__reduce_ex__
    others: Any = kind.__reduce__
    is_ours = str(getattr(method, "__module__", "")).startswith("unidist")
    return others is object.__reduce__ and (is_ours or method is object.__reduce_ex__)
