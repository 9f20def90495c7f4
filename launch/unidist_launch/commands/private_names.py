"""Finds names that are not public, in the sources of a plugin: imports and attributes. Nothing of the plugin is run.

Public is what an `__all__` lists: that of the module, or of a folder above it. Of a class it is what has no underscore,
and what its docstring names for subclasses. A plugin that uses more works until a release moves what it uses.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from unidist.installation import DISTRIBUTION
from unidist.runtime.plugin_manager import ENTRY_POINT_GROUP

_CORE, _LAUNCHER = "unidist", "unidist_launch"


def private_names(plugin: str, distribution: str) -> list[str]:
    """Return a sentence for each private name of unidist's packages that the package of a plugin uses.

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
    # A base class of ours shares attributes with its subclasses in the same distribution, which move with it.
    foreign = {} if distribution == DISTRIBUTION else _private_attributes(files, theirs)
    found = []
    for file in files:
        place = file.relative_to(location.parent.parent if len(files) > 1 else location.parent)
        found += [
            f"{place}:{line}: imports {name}, which is private: no __all__ lists it"
            for line, name in _private(file, theirs)
        ]
        found += [
            f"{place}:{node.lineno}: uses {node.attr}, which is private: an attribute of {foreign[node.attr]}"
            for node in ast.walk(_parsed(file))
            if isinstance(node, ast.Attribute) and node.attr in foreign
        ]
    return found


def _private_attributes(files: Sequence[Path], packages: frozenset[str]) -> dict[str, str]:
    """Return the private attributes of the classes that a plugin imports, with the class that each is of.

    What the plugin defines under the same name is its own.
    """
    found: dict[str, str] = {}
    for file in files:
        for node in ast.walk(_parsed(file)):
            if (
                isinstance(node, ast.ImportFrom)
                and not node.level
                and (node.module or "").partition(".")[0] in packages
            ):
                for alias in node.names:
                    for attribute, owner in _attributes_of(node.module or "", alias.name).items():
                        found.setdefault(attribute, owner)
    own = {name for file in files for node in ast.walk(_parsed(file)) for name in _defined(node)}
    return {attribute: owner for attribute, owner in found.items() if attribute not in own}


@functools.cache
def _attributes_of(module: str, name: str) -> dict[str, str]:
    """Return the private attributes of a class, those of its bases in our packages among them; {} if it is no class."""
    home = _home(module, name)
    found: dict[str, str] = {}
    for node in ast.walk(_tree(home)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            text = ast.get_docstring(node) or ""
            private = {each for inner in ast.walk(node) for each in _defined(inner) if _is_private(each)}
            found |= {each: f"{home}.{name}" for each in sorted(private) if f"`{each}`" not in text}
            for base in node.bases:
                if isinstance(base, ast.Name) and base.id != name:
                    found = {**_attributes_of(home, base.id), **found}
    return found


def _home(module: str, name: str) -> str:
    """Return the module of our packages from which a module has a name by its imports; itself if it imports none."""
    seen = {module}
    while True:
        sources = {
            node.module
            for node in ast.walk(_tree(module))
            if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names)
        }
        further = [each for each in sorted(sources - seen) if each.partition(".")[0] in _own_packages()]
        if not further:
            return module
        module = further[0]
        seen.add(module)


def _defined(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node defines: functions, classes, variables, and attributes of `self`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
        yield from [node.attr] if node.value.id in ("self", "cls") else []


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _tree(module: str) -> ast.Module:
    location = _location(module)
    return ast.Module([], []) if location is None else _parsed(location)


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
