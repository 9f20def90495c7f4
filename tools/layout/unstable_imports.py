"""Parts of a framework that its next version may change are used in few modules: one for each subject.

The table `[tool.unidist.layout.unstable]` of pyproject.toml lists for each framework these parts, and the modules that
may use them: which say in their docstrings what they rely on ("Relies on"), and since which version. A part is used
where it is imported, and where an attribute of that name is read (`jax._src.core`).
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from typing import cast

from tools.layout.project import Module, Project

STATEMENT = "Relies on"


def check_unstable_imports(project: Project) -> list[str]:
    """Return each use of an unstable part elsewhere, and each listed module without a use or without the statement."""
    found = []
    table = cast(Mapping[str, Mapping[str, list[str]]], project.settings.get("unstable", {}))
    for framework, entry in table.items():
        allowed, used = entry["modules"], set[str]()
        for module in project.modules.values():
            for line, name in _uses(module, entry["parts"]):
                used.add(module.name)
                if module.name not in allowed:
                    found.append(f"{module.path}:{line}: uses {name}; that is for {', '.join(allowed)} alone")
        for name in allowed:
            if name not in used:
                found.append(f"pyproject.toml:1: {name} uses no unstable part of {framework}; take it off the list")
            elif STATEMENT not in (ast.get_docstring(project.modules[name].tree) or ""):
                found.append(f'{project.modules[name].path}:1: say what it "{STATEMENT}" of {framework}')
    return found


def _uses(module: Module, parts: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield each line that imports or names one of the parts, and what it names of it."""
    names = {(item.line, f"{item.module}.{item.name}".rstrip(".")) for item in module.imports}
    names |= {(node.lineno, ast.unparse(node)) for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)}
    for line, name in sorted(names):
        if any(name == part or name.startswith(f"{part}.") for part in parts):
            yield line, name
