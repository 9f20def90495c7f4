"""Pickles a function so that another process can run it, also from `__main__`, a notebook or a test module."""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import cloudpickle

from unidist.errors import UsageError

# Which modules go by value is a setting of cloudpickle for the whole process.
_by_value_lock = threading.Lock()


def dump_call(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, to_other_machines: bool = False
) -> bytes:
    """Return the call as bytes; `pickle.loads` in a worker gives back the three.

    Modules that a worker could not import are sent along by value: the function's own and, of its
    top-level package, whatever else is loaded here.

    Args:
        function: to call.
        args: its arguments.
        kwargs: its keyword arguments.
        to_other_machines: the worker does not get this process's `sys.path`: all modules that lie elsewhere than where
            packages are installed are sent by value.

    Raises:
        UsageError: something in the call cannot be pickled; says what pickle says.
    """
    return dump_calls(function, [args], kwargs, to_other_machines=to_other_machines)[0]


def dump_calls(
    function: Any, args_of_calls: Sequence[tuple[Any, ...]], kwargs: dict[str, Any], *, to_other_machines: bool = False
) -> list[bytes]:
    """Return what `dump_call` does for each of several calls: the modules are looked for once, which takes longest."""
    chosen = _not_installed() if to_other_machines else _not_importable(_module_of(function))
    with _by_value_lock, _sent_by_value(chosen):
        try:
            return [cloudpickle.dumps((function, args, kwargs)) for args in args_of_calls]
        except Exception as exc:  # whatever the __reduce__ of the user's objects raises
            raise UsageError(f"cannot send {function!r} and its arguments to another process: {exc}") from exc


@contextmanager
def _sent_by_value(modules: list[ModuleType]) -> Iterator[None]:
    before = cloudpickle.list_registry_pickle_by_value()
    chosen = [item for item in modules if item.__name__ not in before]
    for item in chosen:
        cloudpickle.register_pickle_by_value(item)
    try:
        yield
    finally:
        for item in chosen:
            cloudpickle.unregister_pickle_by_value(item)


def _not_importable(module: ModuleType | None) -> list[ModuleType]:
    """Return those of a module's package that a fresh process with our `sys.path` would not find, or not there."""
    if module is None:
        return []
    path, num_finders = tuple(sys.path), len(sys.meta_path)
    return [
        item
        for item in _package_mates(module)
        if not _finds(item.__name__, getattr(item, "__file__", None), path, num_finders)
    ]


def _not_installed() -> list[ModuleType]:
    roots = tuple(f"{os.path.realpath(sysconfig.get_path(name))}{os.sep}" for name in ("stdlib", "purelib", "platlib"))
    found = []
    for name, item in list(sys.modules.items()):
        file = getattr(item, "__file__", None)
        if name == "__main__" or not isinstance(item, ModuleType) or item.__name__ != name or not file:
            continue
        if not os.path.realpath(file).startswith(roots) and not _is_editable(name):
            found.append(item)
    return found


def _is_editable(name: str) -> bool:
    top = name.partition(".")[0]
    finders = [finder for finder in sys.meta_path if getattr(finder, "__module__", "").startswith("__editable__")]
    return any(finder.find_spec(top, None) is not None for finder in finders)


def _module_of(function: Any) -> ModuleType | None:
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    name = getattr(function, "__module__", None) or type(function).__module__
    return None if name == "__main__" else sys.modules.get(name)  # cloudpickle sends __main__ by value anyway


def _package_mates(module: ModuleType) -> list[ModuleType]:
    top = module.__name__.partition(".")[0]
    inside = f"{top}."
    names = [name for name in list(sys.modules) if name == top or name.startswith(inside)]  # of thousands
    # Only by a module's own name: it may have others as well, here or in another package.
    found = [(name, sys.modules.get(name)) for name in names]
    return [item for name, item in found if isinstance(item, ModuleType) and item.__name__ == name]


@functools.lru_cache(maxsize=4096)  # looking on the disk for all modules of a large package costs more than the call
def _finds(module: str, file: str | None, search_path: tuple[str, ...], num_finders: int) -> bool:
    """Return whether the search path leads from this name to this very file."""
    path: Any = search_path
    spec = None
    parts = module.split(".")
    for i in range(len(parts)):
        spec = _find_spec(".".join(parts[: i + 1]), path)
        if spec is None:
            return module in sys.builtin_module_names
        path = spec.submodule_search_locations or []
    return spec is not None and (file is None or spec.origin == file)


def _find_spec(name: str, path: Any) -> importlib.machinery.ModuleSpec | None:
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is not None:
        return spec
    # An editable install is found by a class that setuptools brings into every process of this environment.
    for finder in sys.meta_path:
        if getattr(finder, "__module__", "").startswith("__editable__"):
            spec = finder.find_spec(name, path)
            if spec is not None:
                return spec
    return None
