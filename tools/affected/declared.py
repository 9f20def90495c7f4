"""What setup.py and the modules of plugins declare: C sources of modules, and names that plugins register."""

from __future__ import annotations

import ast
import configparser
import posixpath
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from tools.affected.mentions import strings_in
from tools.layout.project import CORE


class Registered(NamedTuple):
    """What a plugin registers by one call of a class `...Spec`.

    Attributes:
        kind: the name of the class.
        names: the names that it is registered by; more than one if the call is in a loop.
        strings: all strings in the call.
    """

    kind: str
    names: frozenset[str]
    strings: tuple[str, ...]


def registered(tree: ast.Module) -> Iterator[Registered]:
    """Yield what the module of a plugin registers, by the first argument of each call, or by the argument `name`."""
    variables = _variables(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("Spec"):
            named = [keyword.value for keyword in node.keywords if keyword.arg == "name"] or node.args[:1]
            values = [variables.get(each.id, each) if isinstance(each, ast.Name) else each for each in named]
            keys = [key for value in values for key in (value.keys if isinstance(value, ast.Dict) else [value]) if key]
            names = frozenset(text for key in keys for text in strings_in(key))
            yield Registered(node.func.id, names, tuple(strings_in(node)))


def _variables(tree: ast.Module) -> dict[str, ast.expr]:
    """Return variables with what they are assigned; those of loops with what the loop goes through."""
    assigned: dict[str, ast.expr] = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    loops = {
        variable.id: next((assigned[name] for name in _names(node.iter) if name in assigned), node.iter)
        for node in ast.walk(tree)
        if isinstance(node, ast.For)
        for variable in ast.walk(node.target)
        if isinstance(variable, ast.Name)
    }
    return {**loops, **assigned}


def _names(node: ast.AST) -> Iterator[str]:
    return (each.id for each in ast.walk(node) if isinstance(each, ast.Name))


class EntryPoint(NamedTuple):
    """A line in setup.cfg by which a command or another library finds this project.

    Attributes:
        finder: the library, as "torch"; for a command "scripts", the folder where commands are (`sysconfig`).
        name: the name by which it is found.
        target: where it leads, as "module:name".
    """

    finder: str
    name: str
    target: str


def entry_points(root: Path) -> Iterator[EntryPoint]:
    """Yield the entry points, those of plugins left out."""
    config = configparser.ConfigParser()
    config.read(root / "setup.cfg", encoding="utf-8")
    groups = config["options.entry_points"] if config.has_section("options.entry_points") else {}
    for group in (group for group in groups if group != CORE):
        finder = "scripts" if group == "console_scripts" else group.partition(".")[0]
        for line in groups[group].strip().splitlines():
            name, _, target = line.partition("=")
            yield EntryPoint(finder, name.strip(), target.strip())


def native_sources(root: Path, files: Collection[str]) -> dict[str, list[str]]:
    """Return the C sources and headers, of the files relative to `root`, for each module that setup.py builds.

    They are in the folders that a call of its function `extension` names, and in those that the function itself names.
    """
    path = root / "setup.py"
    tree = ast.parse(path.read_text(encoding="utf-8") if path.exists() else "")
    variables = _variables(tree)
    native = [file for file in files if file.endswith((".c", ".h"))]

    def sources(node: ast.AST) -> set[str]:
        values = [variables[name] for name in _names(node) if name in variables]
        folders = {text for each in (node, *values) for text in strings_in(each)}
        return {file for file in native if posixpath.dirname(file) in folders}

    common = [sources(node) for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {
        next(strings_in(node)): sorted(sources(node).union(*common))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "extension"
    }
