"""The `__init__` of each folder gives the names that it lists, and no others."""

from __future__ import annotations

import ast
import functools
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
AREAS = [ROOT, *(ROOT / area for area in ("adapters", "plugins", "launch"))]
MAKERS = ("lazy_names", "facade_names", "names_of_backend")
"""The functions that make the `__getattr__` of a module whose names are imported when they are used."""


@functools.cache
def file_of(module: str) -> Path:
    """Return the source of a module of ours."""
    path = module.replace(".", "/")
    files = [area / end for area in AREAS for end in (f"{path}.py", f"{path}/__init__.py")]
    return next(file for file in files if file.exists())


@functools.cache
def parsed(module: str) -> ast.Module:
    return ast.parse(file_of(module).read_text(encoding="utf-8"))


def lazy_modules(*makers: str) -> list[str]:
    return sorted(
        ".".join(path.parent.relative_to(area).parts)
        for area in AREAS
        for package in ("unidist", "unidist_*")
        for path in area.glob(f"{package}/**/__init__.py")
        if any(f" = {maker}(" in path.read_text(encoding="utf-8") for maker in makers)
    )


ADAPTERS = ("unidist_torch", "unidist_jax", "unidist_tensorflow")
FACES = [face for face in lazy_modules("lazy_names") if not face.startswith(ADAPTERS)]
"""Those that can be imported without a framework."""


LIBRARIES = {
    "unidist_lightning": "lightning",
    "unidist_local_sgd.jax": "jax",
    "unidist_parameter_server.jax": "jax",
    "unidist_torch_backend.torchft": "torchft",
    "unidist_transformers": "transformers",
}
"""What the names of a plugin need, and not every environment has."""


@pytest.mark.parametrize("face", FACES)
def test_every_listed_name_is_there_once(face: str) -> None:
    if face in LIBRARIES:
        pytest.importorskip(LIBRARIES[face])
    if face.startswith("unidist_ray"):
        pytest.importorskip("ray", reason="ray is not installed; `make test-integrations` has it")
    if face.startswith("unidist_spark"):
        pytest.importorskip("pyspark", reason="pyspark is not installed; `make test-integrations` has it")
    package = importlib.import_module(face)
    assert len(package.__all__) == len(set(package.__all__))
    for name in package.__all__:
        assert hasattr(package, name), name
    with pytest.raises(AttributeError, match=f"{face}.*no_such_name"):
        package.no_such_name  # noqa: B018 - asking is the test


def listed_in(tree: ast.Module) -> list[str]:
    """Return what is in a module's `__all__`."""
    (names,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    found: list[str] = ast.literal_eval(names)
    return found


@functools.cache
def bound_in(tree: ast.Module) -> set[str]:
    """Return the names that a module gives a value when it is imported, or when they are used."""
    found = set[str]()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found |= set(listed_in(tree))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found |= {
                each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
    return found


def sources_of(module: str, tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Return where a lazy module finds its names: the module that defines each, and its name there; "": a module."""
    (call,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKERS and node.args[1:]
    )
    is_relative = ast.unparse(call.func) == "lazy_names"
    found = {}
    for source, names in ast.literal_eval(call.args[1]).items():
        defining, _, original = source.partition(":")
        for name in names.split():
            if not source:
                found[name] = (f"{module}.{name}", "")
            else:
                found[name] = (f"{module}.{defining}" if is_relative else defining, original or name)
    return found


@pytest.mark.parametrize("face", lazy_modules(*MAKERS))
def test_each_name_is_found_where_type_checkers_see_it(face: str) -> None:
    """Read, not imported: so that it holds for every framework, whichever is installed."""
    tree = parsed(face)
    sources, listed = sources_of(face, tree), listed_in(tree)
    for defining, original in sources.values():
        assert not original or original in bound_in(parsed(defining)), f"{defining} has no {original}"
        assert file_of(defining)
    seen = {
        alias.asname or alias.name
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    if "names_of_backend" in ast.unparse(tree):  # the adapter for the backend has the others
        assert sources.keys() <= set(listed)
    else:
        assert sources.keys() == set(listed)
    brought_by_plugins = {"data_service"}
    assert seen - brought_by_plugins == set(listed)
