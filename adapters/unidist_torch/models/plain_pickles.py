"""Pickles of modules without what strategies have put into them: `torch.load` makes the plain module, without unidist.

`torch.load(weights_only=True)` takes such a file with the safe globals of the plain module.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch

_STATE, _DEEPCOPY = "__getstate__", "__deepcopy__"

Removal = Callable[[dict[str, Any]], None]
"""Takes something out of a module's state, which is a copy of its `__dict__`."""


class _PlainState:
    """The method `__getstate__` of a module.

    Args:
        module: has it as an attribute.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        self.of_pickles: list[Removal] = []
        self.of_all: list[Removal] = []
        self.is_copying = False

    def __call__(self) -> Any:
        module: Any = self._module()
        kind: Any = type(module)
        state = kind.__getstate__(module)
        if not isinstance(state, dict):
            return state
        state = {name: value for name, value in state.items() if name not in (_STATE, _DEEPCOPY)}
        for remove in self.of_all if self.is_copying else [*self.of_all, *self.of_pickles]:
            remove(state)
        return state


class _DeepCopy:
    """The method `__deepcopy__` of a module, whose copies keep what its pickles have not.

    Args:
        module: has it as an attribute.
        state: of the same module.
    """

    def __init__(self, module: torch.nn.Module, state: _PlainState) -> None:
        self._module = weakref.ref(module)
        self._state = state

    def __call__(self, memo: Any) -> Any:
        module: Any = self._module()
        del module.__dict__[_DEEPCOPY]
        self._state.is_copying = True
        try:
            made = copy.deepcopy(module, memo)
        finally:
            self._state.is_copying = False
            module.__dict__[_DEEPCOPY] = self
        for remove in self._state.of_pickles:
            leave_out(made, remove, copies=False)
        return made


def leave_out(module: torch.nn.Module, remove: Removal, *, copies: bool) -> None:
    """Let pickles of a module be without something; does nothing for a class that decides what is pickled.

    Args:
        module: of any class.
        remove: takes it out of the state; the same function is asked once.
        copies: deep copies are without it, too.
    """
    if not _asks_for_state(type(module)):
        return
    state = module.__dict__.get(_STATE)
    if not isinstance(state, _PlainState):
        state = module.__dict__[_STATE] = _PlainState(module)
    removals = state.of_all if copies else state.of_pickles
    if remove not in removals:
        removals.append(remove)
    if state.of_pickles:
        module.__dict__[_DEEPCOPY] = _DeepCopy(module, state)


def _asks_for_state(kind: type[Any]) -> bool:
    """Return whether pickles of objects of a class, ours or one that does not define them, ask `__getstate__`."""
    method: Any = kind.__reduce_ex__
    others: Any = kind.__reduce__
    is_ours = str(getattr(method, "__module__", "")).startswith("unidist")
    return others is object.__reduce__ and (is_ours or method is object.__reduce_ex__)
