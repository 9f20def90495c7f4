"""The files of a project: what is in them, and where the names of modules, files and folders lead."""

from __future__ import annotations

import ast
import posixpath
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

from tools.affected.declared import EntryPoint, entry_points, native_sources
from tools.affected.mentions import Mentions, read_mentions
from tools.layout.project import AREAS, CORE, Module, Project, imports_of, read_project

PRODUCT = tuple(f"{area}/" for area in (CORE, *AREAS))
"""How the paths of what is distributed begin."""
HELPERS = "tests/helpers"


def is_test(path: str) -> bool:
    """Whether a path, relative to the root, is that of a test file."""
    return path.startswith("tests/") and fnmatch(posixpath.basename(path), "test_*.py")


@dataclass(frozen=True)
class Sources:
    """All files, by their paths relative to the root.

    Attributes:
        root: the folder.
        files: all files in alphabetical order, those that were deleted included.
        project: the packages, and what is in their modules.
        mentions: what is in each Python file in a folder.
        native: for each module that is built of C sources, those.
        entry_points: those of setup.cfg, but for plugins.
    """

    root: Path
    files: tuple[str, ...]
    project: Project
    mentions: Mapping[str, Mentions]
    native: Mapping[str, Collection[str]]
    entry_points: Sequence[EntryPoint]

    @cached_property
    def tests(self) -> frozenset[str]:
        """The test files that are there."""
        return frozenset(path for path in self.files if is_test(path) and (self.root / path).exists())

    def text(self, path: str) -> str:
        """Return what is in a file; "" if it is deleted."""
        return _text(self.root / path)

    def module(self, module: str, name: str = "") -> Iterator[str]:
        """Yield what runs when a module of a package is imported and a name of it is used.

        Those are the packages on the way and the module that defines the name.
        """
        modules = self.project.modules
        for target in (module, f"{module}.{name}", self.project.definer(module, name)):
            parts = target.split(".")
            for length in range(1, len(parts) + 1):
                if (on_the_way := ".".join(parts[:length])) in modules:
                    yield modules[on_the_way].path
            yield from self.native.get(target, ())

    def beside(self, path: str, module: str, name: str = "") -> list[str]:
        """Return the files outside of the packages that the file at `path` may import by this name.

        Tests put folders into `sys.path`: that of helpers, their own and those above it, and those of files `_x.py`.
        """
        for whole in (f"{module}.{name}", module):
            found = self._importable.get(whole, [])
            if "." not in whole and not (whole.startswith("_") and not whole.startswith("__")):
                folders = (HELPERS, *_folders_of(path))
                found = [file for file in found if posixpath.dirname(file.removesuffix("/__init__.py")) in folders]
            if found:
                return found
        return []

    def named(self, path: str, name: str) -> list[str]:
        """Return the files that a name in the file at `path` may mean: "digits.py", "torch/digits.py".

        Where there are several, it is the one beside it, or in the folder whose tests these are, if there is one.
        """
        found = [file for file in self._named.get(posixpath.basename(name), ()) if f"/{file}".endswith(f"/{name}")]
        folder = posixpath.dirname(path)
        for file in (f"{folder}/{name}", f"{folder.removeprefix('tests/')}/{name}"):
            if file in found:
                return [file]
        return found

    def inside(self, folder: str) -> list[str]:
        """Return all files in a folder, and in those below it."""
        return self._inside.get(folder, [])

    @cached_property
    def _importable(self) -> Mapping[str, list[str]]:
        found: defaultdict[str, list[str]] = defaultdict(list)
        for file in self.files:
            if file.endswith(".py") and not file.startswith(PRODUCT):
                parts = file.removesuffix(".py").removesuffix("/__init__").split("/")
                for start in range(len(parts)):
                    found[".".join(parts[start:])].append(file)
        return found

    @cached_property
    def _named(self) -> Mapping[str, list[str]]:
        found: defaultdict[str, list[str]] = defaultdict(list)
        for file in self.files:
            found[posixpath.basename(file)].append(file)
        return found

    @cached_property
    def _inside(self) -> Mapping[str, list[str]]:
        found: defaultdict[str, list[str]] = defaultdict(list)
        for file in self.files:
            for folder in _folders_of(file):
                found[folder].append(file)
        return found


def read_sources(root: Path, files: Collection[str]) -> Sources:
    """Read the project in a folder; see `read_graph`."""
    project = _with_deleted(read_project(root), files)
    mentions = {
        module.path: read_mentions(module.path, module.tree, module.imports) for module in project.modules.values()
    }
    for path in sorted(files):
        if path.endswith(".py") and "/" in path and not path.startswith(PRODUCT):
            tree = ast.parse(_text(root / path), path)
            imports = tuple(imports_of(tree, posixpath.dirname(path).replace("/", "."), project.modules.keys()))
            mentions[path] = read_mentions(path, tree, imports)
    return Sources(
        root, tuple(sorted(files)), project, mentions, native_sources(root, files), tuple(entry_points(root))
    )


def _with_deleted(project: Project, files: Collection[str]) -> Project:
    """Return the project with an empty module for each that is deleted."""
    modules = dict(project.modules)
    for path in sorted({*files} - {module.path for module in modules.values()}):
        if path.endswith(".py") and path.startswith(PRODUCT):
            start = 0 if path.startswith(f"{CORE}/") else 1
            name = ".".join(path.removesuffix(".py").removesuffix("/__init__").split("/")[start:])
            modules[name] = Module(name, path, ast.parse(""), path.endswith("/__init__.py"), (), frozenset())
    return Project(modules, project.entry_modules, project.settings)


def _folders_of(path: str) -> Iterator[str]:
    while path := posixpath.dirname(path):
        yield path


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
