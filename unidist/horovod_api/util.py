"""Small functions that scripts import from `horovod.common.util`."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

from packaging.version import Version

from unidist.horovod_api import lifecycle

__all__ = [
    "HorovodVersionMismatchError", "ccl_built", "check_extension", "ddl_built", "env", "extension_available",
    "gloo_built", "is_iterable", "is_version_greater_equal_than", "mpi_built", "num_rank_is_power_2", "split_list",
]  # fmt: skip

Item = TypeVar("Item")
Given = ParamSpec("Given")
_FRAMEWORKS = ("tensorflow", "torch")


class HorovodVersionMismatchError(ImportError):
    """Horovod's error for a framework of another version than it was built for. Nothing raises it here."""


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether there is a binding of this framework ("torch", "tensorflow") and the framework is installed.

    Args:
        ext_base_name: the framework's package.
        verbose: print the answer.
    """
    found = ext_base_name in _FRAMEWORKS and importlib.util.find_spec(ext_base_name) is not None
    if verbose:
        print(f"unidist can{'' if found else 'not'} be used with {ext_base_name} here")
    return found


def check_extension(ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: Any) -> None:
    """Return if the binding of a framework ("horovod.torch") can be used.

    Args:
        ext_name: of the binding.
        ext_env_var: about Horovod's build, as are the next ones; not looked at.
        pkg_path: see there.
        args: see there.

    Raises:
        ImportError: it cannot; says why.
    """
    framework = ext_name.rpartition(".")[2]
    if not extension_available(framework):
        why = f"{framework} is not installed" if framework in _FRAMEWORKS else f"unidist has no {framework!r}"
        raise ImportError(f"{ext_name}: {why}")


def is_iterable(value: Any) -> bool:
    """Return whether a value can be iterated over."""
    try:
        iter(value)
    except TypeError:
        return False
    return True


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of two, as Adasum needs it."""
    return num_rank > 0 and not num_rank & (num_rank - 1)


def split_list(items: Sequence[Item], num_parts: int) -> list[Sequence[Item]]:
    """Divide a list into `num_parts` lists of neighbours, the longer ones first; their lengths differ by 1 at most."""
    shortest, num_longer = divmod(len(items), num_parts)
    ends = [shortest * part + min(part, num_longer) for part in range(num_parts + 1)]
    return [items[begin:end] for begin, end in itertools.pairwise(ends)]


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables within a `with` block; those that are None are left alone.

    Args:
        variables: their values, by name.
    """
    given = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def compute_once(function: Callable[Given, Item]) -> Callable[Given, Item]:
    """Wrap a function so that it runs once for each set of arguments, which are hashable."""
    return cast("Callable[Given, Item]", functools.wraps(function)(functools.cache(function)))


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether the version `ver` is `target` or a later one.

    Raises:
        ValueError: one of them is no text, or `target` is not made of three numbers, as "2.8.0".
    """
    if not isinstance(ver, str) or not isinstance(target, str) or target.count(".") != 2:
        raise ValueError(f"is_version_greater_equal_than({ver!r}, {target!r}): give texts such as '2.8.0'")
    return Version(ver) >= Version(target)


def mpi_built(verbose: bool = False) -> bool:
    """Return whether the engine `mpi` can be used.

    Args:
        verbose: print the answer; so for the functions below.
    """
    return _told("mpi", lifecycle.mpi_built(), verbose)


def gloo_built(verbose: bool = False) -> bool:
    """Return whether the engine `gloo` can be used."""
    return _told("gloo", lifecycle.gloo_built(), verbose)


def ddl_built(verbose: bool = False) -> bool:
    """Return False: no engine uses IBM's DDL."""
    return _told("ddl", lifecycle.ddl_built(), verbose)


def ccl_built(verbose: bool = False) -> bool:
    """Return False: no engine uses Intel's oneCCL."""
    return _told("ccl", lifecycle.ccl_built(), verbose)


def _told(name: str, usable: bool, verbose: bool) -> bool:
    if verbose:
        print(f"unidist can{'' if usable else 'not'} use {name} here")
    return usable
