"""The faces of folders: an `__init__` lists the public names of its folder; each is imported when it is first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping

from unidist.installation import check_package

__all__ = ["lazy_imports", "lazy_names"]

check_package()


def lazy_names(package: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package by which importing the package takes microseconds.

    Args:
        package: its `__name__`.
        names: by module of the package, the public names that it defines, with blanks between them. Under "": those
            that are modules themselves.
    """
    return lazy_imports(package, {f"{package}.{module}" if module else "": names[module] for module in names})


def lazy_imports(module: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a module whose names come from anywhere.

    Args:
        module: its `__name__`.
        names: by import path of another module, the names that it defines, with blanks between them; or, by
            "path:name", the name here of a thing that is called differently there. Under "": those that are modules in
            this package.
    """
    sources = {name: source for source, listed in names.items() for name in listed.split()}
    # Python gives a submodule that is imported to its package as an attribute, in place of what is called like it.
    hidden = [name for name, source in sources.items() if source.partition(":")[0] == f"{module}.{name}"]
    assert not hidden, f"{module}: a name cannot be that of the submodule that defines it: {', '.join(hidden)}"

    def get(name: str) -> object:
        if name not in sources:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if not sources[name]:
            return importlib.import_module(f"{module}.{name}")
        source, _, original = sources[name].partition(":")
        found: object = getattr(importlib.import_module(source), original or name)
        setattr(sys.modules[module], name, found)
        return found

    return get
