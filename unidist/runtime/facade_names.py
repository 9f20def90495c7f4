"""What `unidist.torch` and its like offer: names of an adapter, and those that plugins bring.

Each is imported when a script first asks for it. So a script imports what it uses: no elastic training without elastic
training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from unidist.lazy import lazy_imports

if TYPE_CHECKING:
    from unidist.facade import FacadeNameSpec
    from unidist.registry import Registry

__all__ = ["facade_names"]


def facade_names(facade: str, names: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a module that scripts import.

    Args:
        facade: its `__name__`: "unidist.torch".
        names: all that its `__all__` lists, see `lazy_imports`.
    """
    listed = {name for each in names.values() for name in each.split()}
    own = lazy_imports(facade, names)
    short = facade.partition(".")[2]

    def get(name: str) -> object:
        if name in listed:
            return own(name)
        if not name.startswith("_"):  # Python and others ask for many that are no names of plugins
            for spec in _specs():
                if spec.name == f"{short}.{name}":
                    found: object = spec.load()
                    setattr(sys.modules[facade], name, found)
                    return found
        raise AttributeError(f"module {facade!r} has no attribute {name!r}, and no plugin that is loaded adds it")

    def dir_() -> list[str]:
        added = {spec.attribute for spec in _specs() if spec.facade == short}
        return sorted({*vars(sys.modules[facade]), *listed, *added})

    return get, dir_


def _specs() -> Registry[FacadeNameSpec]:
    """Return what plugins bring. Asking for it loads all plugins, so that is not done for the names of the adapter."""
    from unidist.facade import FacadeNameSpec
    from unidist.runtime.context import plugins

    return plugins().registry(FacadeNameSpec)
