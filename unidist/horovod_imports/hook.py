"""The import hook: a finder in front of all others that makes Horovod's modules out of unidist's."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

from typing_extensions import override

from unidist.errors import UsageError
from unidist.horovod_imports.path import AS_HOROVOD, PATH_ENTRY, with_path_entry
from unidist.horovod_imports.table import MODULES, VERSION, why_absent

_ROOT = "horovod"
_PAGE = "docs/horovod.md lists what there is"


def as_horovod() -> None:
    """Answer `import horovod`, and imports of all its modules, with unidist from now on, in this process.

        import unidist
        unidist.as_horovod()
        import horovod.torch as hvd

    `unidist launch --as-horovod` does it for a script that cannot be changed; this is for notebooks. Processes that
    this one starts are answered, too: the variables PYTHONPATH and UNIDIST_AS_HOROVOD tell them. Local: no rank waits
    for another. Called again, it does nothing.

    Whether Horovod is installed does not matter. If it is, the engine `horovod` goes on using it.

    Raises:
        UsageError: Horovod itself was started in this process.
    """
    with _lock:
        if _finder in sys.meta_path:
            return
        for name, module in _modules().items():
            if name.endswith(".mpi_ops") and module.is_initialized():
                raise UsageError(
                    f"{name.removesuffix('.mpi_ops')}.init() has started Horovod itself in this process. Call "
                    "unidist.as_horovod() before the first import of horovod."
                )
        _real.update({name: module for name, module in _taken_out().items() if not _is_path_entry(module)})
        sys.meta_path.insert(0, _finder)
        if PATH_ENTRY not in sys.path:
            sys.path.insert(1, PATH_ENTRY)  # processes that multiprocessing spawns get this list
        os.environ["PYTHONPATH"] = with_path_entry(os.environ.get("PYTHONPATH", ""))
        os.environ[AS_HOROVOD] = "1"


@contextmanager
def real_horovod() -> Iterator[None]:
    """Let imports find the Horovod that is installed, for what is built on that.

    To be left soon: an import of Horovod by another thread meanwhile would find it, too.
    """
    with _lock:
        if PATH_ENTRY in sys.path:
            as_horovod()  # or what is imported here would stay, and be there for the script
        if _finder not in sys.meta_path or _finder.is_aside:
            yield
            return
        _finder.is_aside = True
        ours = _taken_out()
        sys.modules.update(_real)
        place = sys.path.index(PATH_ENTRY) if PATH_ENTRY in sys.path else None
        if place is not None:
            del sys.path[place]
        try:
            yield
        finally:
            if place is not None:
                sys.path.insert(place, PATH_ENTRY)
            _real.update(_taken_out())
            sys.modules.update(ours)
            _finder.is_aside = False


def real_module(name: str) -> ModuleType | None:
    """Return a module of the Horovod that is installed, if this process has imported it."""
    return (_real if _finder in sys.meta_path and not _finder.is_aside else sys.modules).get(name)


class _HorovodModule(ModuleType):
    """A module of Horovod's whose names are unidist's."""

    def __getattr__(self, name: str) -> object:
        whole = f"{self.__name__}.{name}"
        if whole in MODULES:
            return importlib.import_module(whole)
        answer = MODULES[self.__name__]
        if name in answer.names:
            module, _, original = answer.names[name].partition(":")
            found: object = getattr(importlib.import_module(module), original)
            setattr(self, name, found)
            return found
        if name.startswith("__"):  # what Python asks any module for
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        raise AttributeError(_no_such_name(self.__name__, name))

    @override
    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        return importlib.import_module, (self.__name__,)  # cloudpickle knows modules by their exact type

    @override
    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *MODULES[self.__name__].names, *_below(self.__name__)})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes Horovod's modules.

    Attributes:
        is_aside: leaves them to the other finders.
    """

    def __init__(self) -> None:
        self.is_aside = False

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self.is_aside or fullname.partition(".")[0] != _ROOT:
            return None
        package, _, last = fullname.rpartition(".")
        if last == "__main__" and package in MODULES and MODULES[package].module:  # for `python -m` of a package
            ours = importlib.util.find_spec(MODULES[package].module)
            return ours and importlib.util.spec_from_file_location(fullname, ours.origin)
        if fullname not in MODULES:
            # Its `name` is not the module's: `from horovod.torch import x` would replace the text by one of Python's.
            raise ModuleNotFoundError(_no_such_name(*fullname.rpartition(".")[::2]))
        # All are packages: only then does `from horovod.torch.optimizer import x` ask here for what there is not.
        return importlib.machinery.ModuleSpec(fullname, self, origin="unidist", is_package=True)

    @override
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _HorovodModule(spec.name)

    @override
    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        answer = MODULES[name]
        found: dict[str, object] = {}
        if answer.module:
            ours = importlib.import_module(answer.module)
            found = {public: getattr(ours, public) for public in ours.__all__}
            # Modules stay out: `__getattr__` gives Horovod's of the same name.
            found = {public: item for public, item in found.items() if not isinstance(item, ModuleType)}
        module.__dict__.update(found)
        module.__doc__ = f"{name}, answered by unidist{f': {answer.module}' if answer.module else ''}."
        if name == _ROOT:
            module.__dict__["__version__"] = VERSION
            module.__dict__["__file__"] = os.path.join(PATH_ENTRY, f"{_ROOT}.py")
            module.__dict__["__all__"] = sorted(answer.names)  # without what would import every framework
        else:
            public = {each for each in answer.names if not each.startswith("_")}
            module.__dict__["__all__"] = sorted({*found, *public, *_below(name)})


_finder = _Finder()
_lock = threading.RLock()
_real: dict[str, ModuleType] = {}
"""Modules of the Horovod that is installed, while ours stand in `sys.modules` under their names."""


def _no_such_name(module: str, name: str) -> str:
    whole = f"{module}.{name}"
    if reason := why_absent(whole):
        return f"unidist has no {whole}. {reason}"
    reason = MODULES[module].missing.get(name, "") if module in MODULES else ""
    return f"unidist has no {whole}: {reason or _PAGE}"


def _below(module: str) -> set[str]:
    """Return the names of the modules in one of Horovod's packages."""
    return {name.rpartition(".")[2] for name in MODULES if name.rpartition(".")[0] == module}


def _modules() -> dict[str, ModuleType]:
    found = dict(sys.modules)
    return {name: module for name, module in found.items() if name == _ROOT or name.startswith(f"{_ROOT}.")}


def _taken_out() -> dict[str, ModuleType]:
    found = _modules()
    for name in found:
        del sys.modules[name]
    return found


def _is_path_entry(module: ModuleType) -> bool:
    return os.path.dirname(getattr(module, "__file__", None) or "") == PATH_ENTRY
