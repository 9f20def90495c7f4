"""Which files depend on which, and what follows from a change."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Link(NamedTuple):
    """One file depends on another. Paths are relative to the root.

    Attributes:
        path: the file that depends.
        target: the file that it depends on.
        reason: why, as the end of a sentence: "imports a.b".
        is_alone: whether it depends on that file alone, and not on what that depends on in turn.
    """

    path: str
    target: str
    reason: str
    is_alone: bool = False


@dataclass(frozen=True)
class Graph:
    """What connects the files of a project.

    Attributes:
        tests: the test files.
        dependents: for each file, the links from others to it.
    """

    tests: frozenset[str]
    dependents: Mapping[str, Collection[Link]]

    @classmethod
    def of(cls, tests: Iterable[str], links: Iterable[Link]) -> Graph:
        """Return the graph of these links."""
        dependents: defaultdict[str, dict[tuple[str, bool], Link]] = defaultdict(dict)
        for link in links:
            if link.path != link.target:
                dependents[link.target].setdefault((link.path, link.is_alone), link)
        return cls(frozenset(tests), {target: list(links.values()) for target, links in dependents.items()})

    def affected(self, changed: Collection[str]) -> frozenset[str]:
        """Return the test files that may pass or fail differently when these files have changed."""
        return self.tests & self._reached(changed).keys()

    def explain(self, changed: Collection[str], test: str) -> list[str]:
        """Return why a change affects a test file, a line for each file on the way to it; [] if it does not."""
        reached = self._reached(changed)
        lines = list[str]()
        while test in reached:
            link = reached[test]
            lines.insert(0, f"{test} {link.reason}")
            test = link.target
        return lines

    def _reached(self, changed: Collection[str]) -> dict[str, Link]:
        """Return all that depends on these files, and the link by which each was found."""
        reached = {path: Link(path, "", "has changed") for path in sorted(changed)}
        waiting = deque(reached)
        while waiting:
            target = waiting.popleft()
            for link in self.dependents.get(target, ()):
                if link.path not in reached and (not link.is_alone or target in changed):
                    reached[link.path] = link
                    waiting.append(link.path)
        return reached
