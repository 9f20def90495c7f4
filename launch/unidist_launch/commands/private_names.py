"""Finds imports of names that are not public, in the sources of a plugin. Nothing of the plugin is run for it.

Public is what an `__all__` lists: that of the module, or of a folder above it. A plugin with such imports works until a
release moves what it imports.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from unidist.installation import DISTRIBUTION
from unidist.runtime.plugin_manager import ENTRY_POINT_GROUP

_CORE, _LAUNCHER = "unidist", "unidist_launch"


def private_imports(plugin: str, distribution: str) -> list[str]:
    """Return a sentence for each private name of unidist's packages that the package of a plugin imports.

    Args:
        plugin: name of its entry point.
        distribution: that the entry point belongs to.
    """
    entry = next(
        (
            each
            for each in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=plugin)
            if each.dist is not None and each.dist.name == distribution
        ),
        None,
    )
    package = entry.module.partition(".")[0] if entry is not None else ""
    location = _location(package)
    if location is None or package == _CORE:
        return []
    files = [location] if location.name != "__init__.py" else sorted(location.parent.rglob("*.py"))
    theirs = _own_packages() - {package}
    return [
        f"{file.relative_to(location.parent.parent if len(files) > 1 else location.parent)}:{line}: imports {name}, "
        "which is private: no __all__ lists it"
        for file in files
        for line, name in _private(file, theirs)
    ]


def _private(file: Path, packages: frozenset[str]) -> Iterator[tuple[int, str]]:
    tree = _parsed(file)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in packages and not _is_public_import(alias.name):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] in packages:
            for alias in node.names:
                if not _is_public(node.module or "", alias.name):
                    yield node.lineno, f"{node.module}.{alias.name}"


def _is_public_import(module: str) -> bool:
    """Return whether others may write `import module`: of a public module, or of a package with public names."""
    return _is_public_module(module) or (_is_package(module) and bool(_listed(module)))


def _is_public(module: str, name: str) -> bool:
    """Return whether another package may write `from module import name`."""
    if name in _listed(module) and _is_public_module(module):
        return True
    parts = module.split(".")
    folders = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return any(name in _listed(folder) for folder in folders if _is_package(folder))


def _is_public_module(module: str) -> bool:
    """Return whether each package on the way to a module lists the next part of its name, or it is such a package."""
    above, _, last = module.rpartition(".")
    return not above or (last in _listed(above) and _is_public_module(above))


@functools.cache
def _own_packages() -> frozenset[str]:
    """Return the packages of our distribution that plugins may want to import."""
    entries = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    ours = {each.module.partition(".")[0] for each in entries if each.dist and each.dist.name == DISTRIBUTION}
    return frozenset(ours | {_CORE, _LAUNCHER})


@functools.cache
def _listed(module: str) -> frozenset[str]:
    """Return the names in the `__all__` of a module, read from its source."""
    location = _location(module)
    names = set[str]()
    for node in _parsed(location).body if location is not None else ():
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            names.update(str(each.value) for each in ast.walk(node) if isinstance(each, ast.Constant))
    return frozenset(names)


def _is_package(module: str) -> bool:
    location = _location(module)
    return location is not None and location.name == "__init__.py"


@functools.cache
def _location(module: str) -> Path | None:
    """Return the source file of a module, without importing it; None if there is none."""
    top, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(top) if top else None
    except ValueError:  # it is running as a script
        spec = None
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin)
    for part in rest:
        folder = found.parent
        choices = (folder / part / "__init__.py", folder / f"{part}.py")
        found = next((choice for choice in choices if choice.is_file()), folder / "none" / "none")
    return found if found.suffix == ".py" and found.is_file() else None


@functools.cache
def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # importing it says so
        return ast.Module([], [])
