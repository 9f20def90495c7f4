"""The part of `unidist.torch` and its like that plugins bring: found when a script first asks for a name."""

from __future__ import annotations

import sys
from collections.abc import Callable

from unidist.facade import FacadeNameSpec
from unidist.runtime.context import plugins

__all__ = ["names_of_plugins"]


def names_of_plugins(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a module that scripts import.

    Args:
        package: its `__name__`: "unidist.torch".
    """
    facade = package.partition(".")[2]

    def get(name: str) -> object:
        if not name.startswith("_"):  # Python and others ask for many that are no names of plugins
            registry = plugins().registry(FacadeNameSpec)
            if f"{facade}.{name}" in registry:
                found: object = registry.get(f"{facade}.{name}").load()
                setattr(sys.modules[package], name, found)
                return found
        raise AttributeError(f"module {package!r} has no attribute {name!r}, and no plugin that is loaded adds it")

    def names() -> list[str]:
        added = {spec.attribute for spec in plugins().registry(FacadeNameSpec) if spec.facade == facade}
        return sorted({*vars(sys.modules[package]), *added})

    return get, names
