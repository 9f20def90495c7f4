"""numpy as a framework, which trains under unidist's own strategies, and strategies: a small ZeRO, local SGD.

Scripts use `distribute`, `SGD` and a `Model`. They are imported when they are used: every process that uses unidist
imports this package, for its plugin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unidist_second.models import SGD, Model
    from unidist_second.training import distribute

__all__ = ["SGD", "Model", "distribute"]

_MODULES = {"SGD": "models", "Model": "models", "distribute": "training"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found
