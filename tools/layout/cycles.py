"""Imports run down: no two folders of a package import each other, and its root modules import no folder of it.

An import inside a function, under TYPE_CHECKING or by a literal `importlib.import_module` counts like any other. An
import from an `__init__` counts as one from the module that defines the name. An `__init__` that re-exports what lies
in its folder depends on nothing by that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tools.layout.project import Project

Graph = Mapping[str, Mapping[str, "Edge"]]
"""For each folder, the folders that it imports and where it does."""


@dataclass(frozen=True)
class Edge:
    """The first import of one folder by another, as "file:line", and their number."""

    place: str
    count: int


def check_cycles(project: Project) -> list[str]:
    """Return each import between folders that are in a cycle, one line per pair of folders."""
    graph = folder_graph(project)
    found = []
    for cycle in strongly_connected(graph):
        for importer in cycle:
            for imported, edge in sorted(graph[importer].items()):
                if imported in cycle:
                    more = f" (and {edge.count - 1} more)" if edge.count > 1 else ""
                    found.append(
                        f"{edge.place}: {importer} imports {imported}{more}, in the cycle of {' '.join(cycle)}"
                    )
    return found


def check_roots(project: Project) -> list[str]:
    """Return each import of a folder of a package by a module in its root, where contracts and plain data lie.

    Exceptions are in pyproject.toml, as `"module" = "reason"` under `[tool.unidist.layout.roots]`; "package.*" stands
    for all modules in a package's root. The folders must not import back in any case: that is a cycle.
    """
    listed = project.settings.get("roots", {})
    allowed = {pattern for pattern, reason in listed.items() if reason} if isinstance(listed, Mapping) else set[str]()
    found, used = [], set[str]()
    for module in project.modules.values():
        if module.is_package or module.folder != module.package or module.is_facade:
            continue
        exceptions = allowed & {module.name, f"{module.package}.*"}
        for line, definer in project.imported_modules(module):
            used |= exceptions
            if not exceptions:
                found.append(f"{module.path}:{line}: a root module imports the folder {definer.folder}")
    needless = (f"pyproject.toml:1: needless exception for root modules: {name}" for name in sorted(allowed - used))
    return [*found, *needless]


def folder_graph(project: Project) -> Graph:
    """Return who imports whom among the folders of each package."""
    graph: dict[str, dict[str, Edge]] = {module.folder: {} for module in project.modules.values()}
    for module in project.modules.values():
        for line, definer in project.imported_modules(module):
            before = graph[module.folder].get(definer.folder, Edge(f"{module.path}:{line}", 0))
            graph[module.folder][definer.folder] = Edge(before.place, before.count + 1)
    return graph


def strongly_connected(graph: Mapping[str, Mapping[str, object]]) -> list[list[str]]:
    """Return the groups of more than one node each of which reaches all others: the cycles (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for successor in graph.get(node, ()):
            if successor not in index:
                visit(successor)
                low[node] = min(low[node], low[successor])
            elif successor in stack:
                low[node] = min(low[node], index[successor])
        if low[node] == index[node]:
            position = stack.index(node)
            group = sorted(stack[position:])
            del stack[position:]
            if len(group) > 1:
                found.append(group)

    for node in graph:
        if node not in index:
            visit(node)
    return sorted(found)
