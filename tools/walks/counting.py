"""Counts files and calls of recorded walks, and compares them with the limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

PRODUCT = ("unidist", "adapters", "plugins", "launch")
"""The folders of the project whose calls count."""


class Call(NamedTuple):
    """One call of a function.

    Args:
        file: absolute.
        function: its name.
        depth: how many functions have called each other until there.
    """

    file: str
    function: str
    depth: int


@dataclass(frozen=True)
class Limit:
    """The most that a walk may have."""

    files: int
    calls: float


LIMITS = {
    "all-reduce by name": Limit(files=10, calls=19),
    "gradient": Limit(files=6, calls=14),
    "step": Limit(files=19, calls=51),
}


@dataclass(frozen=True)
class Walk:
    """The calls of one operation.

    Args:
        calls: for each call of a function of the product, its file, relative to the project, and its name.
        repeats: how many operations these are.
    """

    calls: Sequence[tuple[str, str]]
    repeats: int = 1

    @property
    def files(self) -> list[str]:
        """The files, in the order in which they are first called."""
        return list(dict.fromkeys(file for file, _ in self.calls))

    @property
    def calls_each(self) -> float:
        """Calls for each operation."""
        return len(self.calls) / self.repeats

    def lines(self) -> list[str]:
        """Return a line for each file, with how often each of its functions is called."""
        found = []
        for file in self.files:
            names = [name for other, name in self.calls if other == file]
            counted = ", ".join(f"{name} {names.count(name) / self.repeats:g}" for name in dict.fromkeys(names))
            found.append(f"  {len(names) / self.repeats:6.4g}  {file}: {counted}")
        return found


def inside(calls: Sequence[Call], function: str) -> list[Call]:
    """Return the calls of a function, and all that these make."""
    return [each for index, call in enumerate(calls) if call.function == function for each in _tree(calls, index)]


def until(calls: Sequence[Call], function: str) -> list[Call]:
    """Return all calls but those that a function makes."""
    made = {
        index + number
        for index, call in enumerate(calls)
        if call.function == function
        for number in range(1, len(_tree(calls, index)))
    }
    return [call for index, call in enumerate(calls) if index not in made]


def _tree(calls: Sequence[Call], start: int) -> list[Call]:
    """Return a call and those that it makes."""
    first = calls[start]
    return [first, *takewhile(lambda call: call.depth > first.depth, calls[start + 1 :])]


def walk_of(calls: Iterable[Call], root: Path, repeats: int = 1) -> Walk:
    """Return the walk of those calls that are in the product, whose folder is `root`."""
    prefixes = tuple(f"{root / folder}/" for folder in PRODUCT)
    start = len(f"{root}/")
    return Walk([(call.file[start:], call.function) for call in calls if call.file.startswith(prefixes)], repeats)


def table(walks: Mapping[str, Walk]) -> list[str]:
    """Return a table of walks by name."""
    rows = [f"{name:20} {len(walk.files):5}  {walk.calls_each:7.4g}" for name, walk in walks.items()]
    return [f"{'walk':20} files    calls", *rows]


def beyond(walks: Mapping[str, Walk], limits: Mapping[str, Limit]) -> list[str]:
    """Return a line for each walk that has more files or calls than its limit."""
    found = []
    for name, walk in walks.items():
        limit = limits[name]
        if len(walk.files) > limit.files or walk.calls_each > limit.calls:
            found.append(
                f"{name}: {len(walk.files)} files and {walk.calls_each:g} calls, but at most {limit.files} and "
                f"{limit.calls:g} are allowed (tools/walks/counting.py)"
            )
    return found
