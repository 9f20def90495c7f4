"""The faces of folders: an `__init__` lists the public names of its folder; each is imported when it is first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping

__all__ = ["lazy_names"]


def lazy_names(package: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package by which importing the package takes microseconds.

    Args:
        package: its `__name__`.
        names: by module of the package, the public names that it defines, with blanks between them. Under "": those
            that are modules themselves.
    """
    modules = {name: module for module, listed in names.items() for name in listed.split()}

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not modules[name]:
            return importlib.import_module(f"{package}.{name}")
        found: object = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, found)
        return found

    return get
