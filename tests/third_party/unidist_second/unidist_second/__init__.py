"""numpy as a framework, which trains under unidist's own strategies, and strategies: a small ZeRO, local SGD.

Scripts use `distribute` or `TrainStep`, `SGD`, a `Model`, `save` and `load`, and `ArrayState` in elastic jobs. They are
imported when they are used: every process that uses unidist imports this package, for its plugin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unidist_second.checkpoint import ArrayState, load, save
    from unidist_second.models import SGD, Model
    from unidist_second.training import TrainStep, distribute

__all__ = ["SGD", "ArrayState", "Model", "TrainStep", "distribute", "load", "save"]

_MODULES = {
    **dict.fromkeys(("ArrayState", "load", "save"), "checkpoint"),
    **dict.fromkeys(("SGD", "Model"), "models"),
    **dict.fromkeys(("TrainStep", "distribute"), "training"),
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found
