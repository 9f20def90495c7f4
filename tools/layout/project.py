"""The sources of a project as parsed trees: modules, their imports, and the names they list as public."""

from __future__ import annotations

import ast
import configparser
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

CORE = "unidist"
AREAS = ("adapters", "plugins", "launch")
"""Folders of the project whose folders are packages; the core is a package itself."""
FACADES = frozenset(f"{CORE}.{name}" for name in ("torch", "tensorflow", "keras", "jax", "ray", "spark"))
"""Modules of the core that re-export what an adapter or a plugin has, and do nothing else."""


@dataclass(frozen=True)
class Import:
    """One name or module that a module imports.

    Attributes:
        module: the absolute dotted name of the module that is named, first-party or not.
        name: the name that is imported from it; "" if the module itself is imported.
        bound: the name that this gives to the importing module; "" if a function call imports.
        line: the line of the statement.
        at_import: whether it runs when the importing module is imported: not inside a function, nor for type checkers.
    """

    module: str
    name: str
    bound: str
    line: int
    at_import: bool

    @property
    def package(self) -> str:
        """The top-level package."""
        return self.module.partition(".")[0]


@dataclass(frozen=True)
class Module:
    """One source file.

    Attributes:
        name: the dotted name; a package's is that of its folder.
        path: the file, relative to the project.
        tree: the parsed source.
        is_package: whether the file is an `__init__.py`.
        imports: all its imports, those inside functions and under TYPE_CHECKING included.
        public: the names in its `__all__`.
    """

    name: str
    path: str
    tree: ast.Module
    is_package: bool
    imports: tuple[Import, ...]
    public: frozenset[str]

    @property
    def package(self) -> str:
        """The top-level package."""
        return self.name.partition(".")[0]

    @property
    def folder(self) -> str:
        """The dotted name of the folder that the file lies in."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def area(self) -> str:
        """The folder of the project: "unidist", "adapters", "plugins" or "launch"."""
        return self.path.partition("/")[0]

    @cached_property
    def is_facade(self) -> bool:
        """Whether this is, or belongs to, a facade of the core."""
        return any(self.name == facade or self.name.startswith(f"{facade}.") for facade in FACADES)


@dataclass(frozen=True)
class Project:
    """All first-party modules by name, the modules that entry points name, and the table `[tool.unidist.layout]`."""

    modules: Mapping[str, Module]
    entry_modules: frozenset[str] = frozenset()
    settings: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def packages(self) -> frozenset[str]:
        """The names of the first-party top-level packages."""
        return frozenset(module.package for module in self.modules.values())

    def imported_modules(self, module: Module) -> Iterator[tuple[int, Module]]:
        """Yield each import of another folder of a module's own package: the line, and the module that defines it."""
        if module.is_facade:
            return
        for item in module.imports:
            if item.package != module.package or item.module not in self.modules:
                continue
            definer = self.modules[self.definer(item.module, item.name)]
            is_own_content = module.is_package and f"{definer.folder}.".startswith(f"{module.name}.")
            if definer.folder != module.folder and not is_own_content and not definer.is_facade:
                yield item.line, definer

    def definer(self, module: str, name: str) -> str:
        """Return the module that defines what `from module import name` gives, past the `__init__` files on the way."""
        seen = set[tuple[str, str]]()
        while name and module in self.modules and self.modules[module].is_package and (module, name) not in seen:
            seen.add((module, name))
            for item in self.modules[module].imports:
                if item.bound == name and item.module in self.modules:
                    module, name = item.module, item.name
                    break
        return module


def read_project(root: Path) -> Project:
    """Parse the sources of the project in the folder `root`."""
    files = {name: path for folder in _package_folders(root) for name, path in _files(folder)}
    modules = {}
    for name, path in files.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        is_package = path.name == "__init__.py"
        imports = tuple(imports_of(tree, name if is_package else name.rpartition(".")[0], files.keys()))
        relative = path.relative_to(root).as_posix()
        modules[name] = Module(name, relative, tree, is_package, imports, _public_names(tree))
    return Project(modules, _entry_modules(root), _settings(root))


def _package_folders(root: Path) -> Iterator[Path]:
    candidates = [root / CORE, *(path for area in AREAS for path in sorted((root / area).glob("*")))]
    return (path for path in candidates if path.is_dir() and path.name != "__pycache__")


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*.py")):
        parts = (folder.name, *path.relative_to(folder).with_suffix("").parts)
        yield ".".join(parts).removesuffix(".__init__"), path


def imports_of(tree: ast.Module, package: str, modules: Collection[str]) -> Iterator[Import]:
    """Yield the imports of a module in `package`; `modules` has the names of all first-party modules."""
    deferred = set(_deferred(tree))
    for node in ast.walk(tree):
        at_import = node not in deferred
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, "", alias.asname or alias.name, node.lineno, at_import)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                named = (whole, "") if whole in modules else (base, alias.name)
                yield Import(*named, alias.asname or alias.name, node.lineno, at_import)
        elif isinstance(node, ast.Call) and (target := _imported_by_call(node)):
            yield Import(target, "", "", node.lineno, at_import)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    parts = package.split(".")
    above = parts[: len(parts) - node.level + 1] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


def _imported_by_call(node: ast.Call) -> str:
    """Return the module that `importlib.import_module("...")` names; "" for other calls and for computed names."""
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if function not in ("import_module", "__import__") or not node.args:
        return ""
    argument = node.args[0]
    return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else ""


def _deferred(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        is_type_checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if is_type_checking or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from ast.walk(node)


def _public_names(tree: ast.Module) -> frozenset[str]:
    """Return the names in `__all__`, also those that are added to it later."""
    names = set[str]()
    for node in tree.body:
        target: ast.AST | None = None
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            target = node.target
        if isinstance(target, ast.Name) and target.id == "__all__":
            names.update(item.value for item in ast.walk(node) if _is_string(item))  # type: ignore[attr-defined]
    return frozenset(names)


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _entry_modules(root: Path) -> frozenset[str]:
    """Return the modules that setup.cfg names as entry points of the group `unidist`."""
    config = configparser.ConfigParser()
    config.read(root / "setup.cfg", encoding="utf-8")
    lines = config.get("options.entry_points", "unidist", fallback="").strip().splitlines()
    return frozenset(line.partition("=")[2].strip() for line in lines)


def _settings(root: Path) -> Mapping[str, object]:
    path = root / "pyproject.toml"
    document = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    settings: Mapping[str, object] = document.get("tool", {}).get("unidist", {}).get("layout", {})
    return settings
