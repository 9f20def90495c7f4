"""The part of `unidist.keras` that depends on the backend of Keras: the adapter for that backend has it."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType

import keras

from unidist.lazy import lazy_imports


def names_of_backend(package: str, names: Mapping[str, str] | None = None) -> Callable[[str], object]:
    """Return the `__getattr__` of a module of this facade: names of its `__all__` come from the adapter.

    Args:
        package: the module's `__name__`.
        names: those that are the same on every backend, see `lazy_imports`; default: none.
    """
    common = {name for listed in (names or {}).values() for name in listed.split()}
    of_all = lazy_imports(package, names or {})

    def get(name: str) -> object:
        if name in common:
            return of_all(name)
        module = sys.modules[package]
        if name not in module.__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        implementation = _implementation()
        if not hasattr(implementation, name):
            raise AttributeError(
                f"{package}.{name} does not exist where Keras runs on {keras.backend.backend()!r}. Another backend is "
                "chosen by KERAS_BACKEND"
            )
        found: object = getattr(implementation, name)
        setattr(module, name, found)
        return found

    return get


@functools.cache
def _implementation() -> ModuleType:
    """Return the module of the adapter for the backend that Keras runs on.

    Raises:
        ConfigurationError: no adapter that is installed is for it.
    """
    from unidist.errors import ConfigurationError
    from unidist.runtime.context import plugins

    backend = keras.backend.backend()
    modules = {spec.name: spec.keras for spec in plugins().frameworks if spec.keras}
    if backend not in modules:
        raise ConfigurationError(
            f"Keras runs on {backend!r}, for which unidist.keras has no adapter; choices: "
            f"{', '.join(sorted(modules)) or 'none'}. Set KERAS_BACKEND before Keras is imported"
        )
    return importlib.import_module(modules[backend])
