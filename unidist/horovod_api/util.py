"""Small functions that scripts import from `horovod.common.util`."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

__all__ = [
    "HorovodVersionMismatchError", "check_extension", "extension_available", "is_iterable", "num_rank_is_power_2",
    "split_list",
]  # fmt: skip

Item = TypeVar("Item")
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
