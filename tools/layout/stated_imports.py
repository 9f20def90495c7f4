"""A folder's docstring says which folders of its package it imports, and that is so.

The sentence begins with "Imports" or "May import"; the second is a bound, of which not all need be imported. It lists:

- `` `name` ``: a folder or module of the package, or a folder inside of this one (also as `` `name` below ``);
- "the root", or "the modules at the root";
- "the folders below": all that the listed ones import, directly or not; also "the folders below them";
- "all folders below", "all other folders", "every other folder", "any other folder": whatever the other rules allow;
- "no other folder", "nothing": none;
- other packages: "the core", "the PyTorch adapter", "numpy" and the like, which are not looked at here.

After the list may stand "alone", "only", or "of this package". Sentences that begin with "Imports no framework" and the
docstrings of whole packages say something else.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping

from tools.layout.project import Module, Project

SENTENCE = re.compile(r"(?:^|(?<=[.;:] ))(Imports(?! no framework)|May import) (.+?)[.;:](?= |$)")
SUFFIX = re.compile(r" (alone|only)$|( alone)? of this package$")
SEPARATOR = re.compile(r", and |, | and ")
NAME = re.compile(r"`([\w.]+)`( below)?")
ROOT = ("the root", "the modules at the root", "the modules at the root of this package")
BELOW = ("the folders below", "the folders below them")
ANYTHING = ("all folders below", "all other folders", "every other folder", "any other folder")
NONE = ("no other folder", "nothing")
OTHERS = ("the core", "the PyTorch adapter", "the TensorFlow adapter", "the JAX adapter")
LIBRARIES = ("numpy", "torch", "Keras", "TensorFlow")

Imported = Mapping[str, Collection[str]]
"""For each folder, the modules that import it or are imported from it."""


def check_stated_imports(project: Project) -> list[str]:
    """Return each folder whose docstring lists other imports than it has, or in other words than the accepted ones."""
    imported = {name: _imported(project, name) for name, module in project.modules.items() if module.is_package}
    return [
        f"{module.path}:1: {problem}"
        for module in project.modules.values()
        if module.is_package and module.name != module.package
        for is_bound, stated in _sentences(module)
        for problem in _problems(project, module, stated, imported, is_bound=is_bound)
    ]


def _sentences(module: Module) -> Iterator[tuple[bool, str]]:
    """Yield each list of imports in the docstring of a folder, and whether it is a bound."""
    for verb, stated in SENTENCE.findall(" ".join((ast.get_docstring(module.tree) or "").split())):
        yield verb == "May import", SUFFIX.sub("", stated)


def _problems(
    project: Project, module: Module, stated: str, imported: Mapping[str, Imported], *, is_bound: bool
) -> Iterator[str]:
    own = imported[module.name]
    allowed: set[str] = set()  # folders, and modules of folders that are not listed as a whole
    has_below = False
    for item in SEPARATOR.split(stated):
        if item in ANYTHING:
            return
        name = NAME.fullmatch(item)
        if item in BELOW:
            has_below = True
        elif item in ROOT or name:
            found = module.package if name is None else _resolved(project, module, name[1])
            if found is None:
                yield f"the docstring says that it imports {item}, and there is no such folder or module"
                continue
            allowed.add(found)
            if not (is_bound or found in own or any(found in modules for modules in own.values())):
                yield f"the docstring says that it imports {item}, and it does not"
        elif item not in (*NONE, *OTHERS, *LIBRARIES):
            yield f'the docstring says "imports {item}"; say it in the words of tools/layout/stated_imports.py'
            return
    if has_below:
        allowed |= _below(allowed, imported)
    for folder, modules in sorted(own.items()):
        if folder not in allowed and not allowed.issuperset(modules):
            yield f"it imports {'the root' if folder == module.package else folder}, which its docstring does not list"


def _resolved(project: Project, module: Module, name: str) -> str | None:
    """Return the folder or module that a docstring names."""
    candidates = (f"{module.package}.{name}", f"{module.name}.{name}")
    return next((each for each in candidates if each in project.modules), None)


def _below(folders: Collection[str], imported: Mapping[str, Imported]) -> set[str]:
    """Return all that these folders import, directly or not."""
    found: set[str] = set()
    left = list(folders)
    while left:
        new = set(imported.get(left.pop(), ())) - found
        found |= new
        left += new
    return found


def _imported(project: Project, folder: str) -> Imported:
    """Return the folders of the same package that a folder's modules import, with the modules imported from each."""
    found = defaultdict[str, set[str]](set)
    for module in project.modules.values():
        if module.folder == folder:
            for _, definer in project.imported_modules(module):
                if definer.package == module.package:
                    found[definer.folder].add(definer.name)
    return found
