"""A class name is one concept: more than two modules define it only as counterparts in different frameworks."""

from __future__ import annotations

import ast
from collections import defaultdict

from tools.layout.project import Module, Project

FRAMEWORK_PARTS = frozenset(
    f"{prefix}_{name}" for prefix in ("", "unidist") for name in ("torch", "tensorflow", "keras", "jax")
)
"""Parts of the names of modules that are for one framework: `unidist_torch.optimizer`, `unidist_zero._jax.step`."""


def check_class_names(project: Project) -> list[str]:
    """Return each class of more than two of one name, unless all but one (their interface) are of a framework."""
    found = defaultdict[str, list[tuple[Module, ast.ClassDef]]](list)
    for module in project.modules.values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append((module, node))
    return [
        f"{module.path}:{node.lineno}: {len(classes)} modules define {node.name}: say of what this one is"
        for classes in found.values()
        if len(classes) > 2 and sum(not _is_of_framework(module) for module, _ in classes) > 1
        for module, node in classes
    ]


def _is_of_framework(module: Module) -> bool:
    return not FRAMEWORK_PARTS.isdisjoint(module.name.split("."))
