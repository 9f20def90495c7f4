"""Lets `training_step` and the other steps of a LightningModule run inside a call of the module.

Strategies act when the distributed module is called: `zero=3` gathers parameters then, `precision` computes in 16 bits
and scales the loss. Lightning calls `training_step` directly.
"""

from __future__ import annotations

from typing import Any

import torch

from unidist.mixins import with_mixin

_WANTED = "_unidist_method"


class CallsMethods:
    """A mixin in front of a LightningModule's class. Never instantiated by itself; see `call_methods`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method that `call_method` wants, or the module's own forward where a step calls the module."""
        wanted = self.__dict__.get(_WANTED)
        if wanted is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]  # of the module
        self.__dict__[_WANTED] = None
        try:
            return getattr(self, wanted)(*args, **kwargs)
        finally:
            self.__dict__[_WANTED] = wanted

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as the plain module."""
        plain = type(self).__mro__[2]
        kept: dict[str, Any] = self.__getstate__()  # type: ignore[assignment]  # of the module
        state = {name: value for name, value in kept.items() if not name.startswith("_unidist_")}
        return plain.__new__, (plain,), state


def call_methods(module: torch.nn.Module) -> None:
    """Let `call_method` work for a module."""
    if not isinstance(module, CallsMethods):
        module.__class__ = with_mixin(type(module), CallsMethods)
        module.register_forward_pre_hook(_second_call_would_log_twice)


def call_method(module: torch.nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    """Return what a method returns, run inside a call of the module, with its hooks."""
    if not isinstance(module, CallsMethods):
        return getattr(module, name)(*args, **kwargs)
    module.__dict__[_WANTED] = name
    try:
        return module(*args, **kwargs)
    finally:
        module.__dict__[_WANTED] = None


def _second_call_would_log_twice(module: torch.nn.Module, args: Any) -> None:
    """Do nothing. A module with a hook is not called twice by `--verify`: `training_step` logs, and counts batches."""
