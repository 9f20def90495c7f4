"""What one Python file says that may connect it to others: imports, strings, paths, and names of fixtures."""

from __future__ import annotations

import ast
import functools
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass

from tools.layout.project import Import


@dataclass(frozen=True)
class Mentions:
    """What is in one file.

    Attributes:
        imports: its imports, also those inside functions.
        strings: its strings but for docstrings; of `folder / "a" / "b.py"`, where the folder is unknown, "a/b.py".
        places: the files and folders, relative to the root, to which its expressions with `__file__` lead.
        requested: names of fixtures that it may ask for: the arguments of its functions, and `usefixtures`.
        fixtures: names of functions that are fixtures.
        is_for_all: whether it has hooks of pytest, or fixtures that are used without being named.
        plugins: the modules in `pytest_plugins`.
        is_lazy: whether it is an `__init__` that imports what it lists when that is used.
    """

    imports: tuple[Import, ...]
    strings: tuple[str, ...]
    places: tuple[str, ...]
    requested: frozenset[str]
    fixtures: frozenset[str]
    is_for_all: bool
    plugins: tuple[str, ...]
    is_lazy: bool

    def imports_from(self, package: str) -> bool:
        """Whether it imports a top-level package, or a part of it."""
        return any(item.package == package for item in self.imports)


def read_mentions(path: str, tree: ast.Module, imports: tuple[Import, ...]) -> Mentions:
    """Return what is in the file at `path`, relative to the root, with this syntax tree."""
    visit = _Visit(path, tree)
    defined = {node.name for node in visit.functions} | visit.assigned.keys()
    plugins = visit.assigned.get("pytest_plugins")
    return Mentions(
        imports=imports,
        strings=tuple(sorted(visit.strings)),
        places=tuple(sorted(visit.places)),
        requested=frozenset(visit.requested),
        fixtures=frozenset(node.name for node in visit.functions if _fixture(node)),
        is_for_all=any(node.name.startswith("pytest_") or "autouse=True" in _fixture(node) for node in visit.functions),
        plugins=tuple(strings_in(plugins)) if plugins is not None else (),
        is_lazy=path.endswith("__init__.py") and "__getattr__" in defined,
    )


def strings_in(node: ast.AST) -> Iterator[str]:
    """Yield the strings in an expression."""
    for each in ast.walk(node):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _fixture(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the decorator that makes a function a fixture; "" if it is none."""
    return next((text for each in node.decorator_list if "fixture" in (text := ast.unparse(each))), "")


class _Visit:
    """Goes through a tree once, from the outside to the inside."""

    def __init__(self, path: str, tree: ast.Module) -> None:
        self.strings = set[str]()
        self.places = set[str]()
        self.requested = set[str]()
        self.functions: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
        self.assigned: dict[str, ast.expr] = {}
        self._path = path
        self._done = set[ast.AST]()
        nodes = list(ast.walk(tree))
        self._has_places = any(isinstance(node, ast.Name) and node.id == "__file__" for node in nodes)
        for node in nodes:
            if node not in self._done:
                self._visit(node)

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                self.strings.add(node.value)
        elif isinstance(node, ast.Expr):
            if isinstance(node.value, ast.Constant):  # a docstring
                self._done.add(node.value)
        elif isinstance(node, ast.Assign):
            if isinstance(target := node.targets[0], ast.Name):
                self.assigned[target.id] = node.value
                place = self._place(node.value)
                if place and "." in posixpath.basename(place):
                    self.places.add(place)
                if place is not None or target.id == "pytest_plugins":
                    self._done.update(ast.walk(node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.functions.append(node)
            self.requested.update(each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
        elif isinstance(node, ast.BinOp | ast.Call | ast.Attribute | ast.Subscript | ast.Name):
            if isinstance(node, ast.Call) and _name(node.func) in ("usefixtures", "getfixturevalue"):
                self.requested.update(strings_in(node))
            if isinstance(node, ast.Call) and _is_search_path(node.func):
                self._done.update(ast.walk(node))
            elif (place := self._place(node)) is not None:
                self.places.add(place)
                self._done.update(ast.walk(node))
            elif isinstance(node, ast.BinOp) and (parts := list(_last_parts(node))):
                self.strings.add("/".join(reversed(parts)))

    def _place(self, node: ast.AST, *, depth: int = 9) -> str | None:
        """Return where in the project an expression with `__file__` leads; None for others."""
        if not self._has_places or depth == 0:  # 0: a variable that is assigned something of itself
            return None
        inner = functools.partial(self._place, depth=depth - 1)
        match node:
            case ast.Name(id="__file__"):
                return self._path
            case ast.Name(id=name) if name in self.assigned:
                return inner(self.assigned[name])
            case ast.Call(func=ast.Name(id="Path" | "str"), args=[path]):
                return inner(path)
            case ast.Call(func=ast.Attribute(value=path, attr="resolve" | "absolute" | "as_posix")):
                return inner(path)
            case ast.Call(func=ast.Attribute(value=path, attr="with_name"), args=[ast.Constant(value=str(name))]):
                return _joined(_above(inner(path), 1), name)
            case ast.Attribute(value=path, attr="parent"):
                return _above(inner(path), 1)
            case ast.Subscript(value=ast.Attribute(value=path, attr="parents"), slice=ast.Constant(value=int(number))):
                return _above(inner(path), number + 1)
            case ast.BinOp(left=path, op=ast.Div(), right=ast.Constant(value=str(name))):
                return _joined(inner(path), name)
        return None


def _is_search_path(function: ast.expr) -> bool:
    """Whether a call of this tells Python where to look for modules, or asks which it has: that is not using them."""
    return isinstance(function, ast.Attribute) and (
        function.attr == "syspath_prepend"
        or (isinstance(function.value, ast.Attribute) and function.value.attr in ("path", "modules"))
    )


def _above(place: str | None, levels: int) -> str | None:
    for _ in range(levels):
        place = posixpath.dirname(place) if place else None
    return place


def _joined(place: str | None, name: str) -> str | None:
    return None if place is None else posixpath.normpath(posixpath.join(place, name))


def _last_parts(node: ast.AST) -> Iterator[str]:
    """Yield the constants at the end of `folder / "a" / "b.py"`, the last one first."""
    while isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant) and isinstance(node.right.value, str):
        yield node.right.value
        node = node.left
