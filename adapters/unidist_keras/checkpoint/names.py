"""Stable paths of Keras variables: the same in every process that builds the model, no matter what it built before.

Keras numbers layers that were given no name over the whole process: the third `Dense` is `dense_2`, in whichever model
it is. Here they are numbered among their siblings, in the order in which the model lists its variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import keras

_NUMBERED = re.compile(r"(.+?)(?:_(\d+))?")


def stable_paths(variables: Sequence[Any]) -> dict[str, Any]:
    """Return variables by stable path, each once, in their order."""
    automatic = _automatic_names()
    names: dict[tuple[str, ...], str] = {}  # of components that have been met, by the path down to them
    used: dict[tuple[str, ...], dict[str, int]] = {}  # how many of a base there were below a path
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for variable in variables:
        if id(variable) in seen:
            continue
        seen.add(id(variable))
        parts = tuple(str(getattr(variable, "path", variable.name)).partition(":")[0].split("/"))
        for depth in range(1, len(parts)):  # the last component is the variable's own name
            place = parts[:depth]
            if place not in names:
                names[place] = _renumbered(parts[depth - 1], used.setdefault(place[:-1], {}), automatic)
        path = base = "/".join([*(names[parts[:depth]] for depth in range(1, len(parts))), parts[-1]])
        number = 1
        while path in found:  # two layers of one name
            path, number = f"{base}_{number}", number + 1
        found[path] = variable
    return found


def _renumbered(component: str, used: dict[str, int], automatic: frozenset[str]) -> str:
    match = _NUMBERED.fullmatch(component)
    assert match is not None
    base = match[1]
    if base not in automatic:
        return component
    count = used.get(base, 0)
    used[base] = count + 1
    return base if not count else f"{base}_{count}"


def _automatic_names() -> frozenset[str]:
    """Return the names that Keras gives to layers without one: their classes', with underscores."""
    return frozenset(_with_underscores(kind.__name__) for kind in _subclasses(keras.layers.Layer))


def _subclasses(kind: type[Any]) -> Iterable[type[Any]]:
    yield kind
    each: type[Any]
    for each in kind.__subclasses__():
        yield from _subclasses(each)


def _with_underscores(name: str) -> str:
    name = re.sub(r"\W+", "", name)
    name = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
