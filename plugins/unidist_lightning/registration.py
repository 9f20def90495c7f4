"""Lets `Trainer(strategy="unidist")` and `Fabric(strategy="unidist")` work without an import of unidist.

Lightning knows strategies by name, but has no entry points for them. PyTorch has some, which it calls at the end of
`import torch`, and Lightning imports torch before it has strategies. So `register` leaves a finder that adds ours to
Lightning's registries when these are imported. It imports nothing, in case Lightning is not used.

With `TORCH_DEVICE_BACKEND_AUTOLOAD=0` PyTorch does not call it; `import unidist_lightning` does.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from typing_extensions import override

NAME = "unidist"
TRAINERS = "lightning.pytorch.strategies"
FABRICS = "lightning.fabric.strategies"
_DESCRIPTION = "data parallelism, ZeRO and what else `unidist strategies` lists, over unidist's engines"


def register() -> None:
    """Register the strategy now where Lightning is imported already, and when it is imported otherwise."""
    for name in (FABRICS, TRAINERS):
        if (module := sys.modules.get(name)) is not None:
            _add_to(module)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def make_strategy() -> Any:
    """Return a strategy for a Trainer; Lightning calls it for its name."""
    from unidist_lightning.strategy import UnidistStrategy

    return UnidistStrategy()


def make_fabric_strategy() -> Any:
    """Return a strategy for Fabric; Lightning calls it for its name."""
    from unidist_lightning.fabric import UnidistFabricStrategy

    return UnidistFabricStrategy()


def _add_to(module: ModuleType) -> None:
    """Add the strategy to the registry of a module; without one, as of another version, nothing happens."""
    if module.__name__ == TRAINERS:
        registry, make = getattr(module, "StrategyRegistry", None), make_strategy
    else:
        registry, make = getattr(module, "STRATEGY_REGISTRY", None), make_fabric_strategy
    if registry is not None and NAME not in registry:
        registry.register(NAME, make, description=_DESCRIPTION)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds Lightning's two modules as Python does, and adds the strategy once one has been imported."""

    def __init__(self) -> None:
        self._is_asking = False

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self._is_asking or fullname not in (TRAINERS, FABRICS):
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            _add_after(spec.loader)
        return spec


def _add_after(loader: Any) -> None:
    plain = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        plain(module)
        _add_to(module)

    loader.exec_module = exec_module


_finder = _Finder()
