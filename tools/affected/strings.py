"""A file depends on modules, files and folders that its strings name, and on what code in its strings imports."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from fnmatch import filter as fnmatch_filter
from fnmatch import fnmatch

from tools.affected.graph import Link
from tools.affected.imports import imported
from tools.affected.sources import PRODUCT, Sources
from tools.affected.subjects import CODE, TABLES

_REFERENCE = re.compile(r"[\w.]+(:\w*)?")
_DOTTED = re.compile(r"\b[A-Za-z_]\w*(?:\.\w+)+|\b\w+(?=:[A-Z])")
_FROM = re.compile(r"\bfrom\s+([\w.]+)\s+import\s+(\([^)]*|[^\n;#]*)")
_IMPORT = re.compile(r"(?<!\w)import\s+([\w., ]+)")
_COMPUTED = re.compile(r"\bunidist[\w.]*(?=\.(?:\{|$))")
_FILE = re.compile(r"[\w@.-]+(?:/[\w@.-]+)*/?")
_QUOTED = re.compile(r"[\"'](\w+)[\"']")


def string_links(sources: Sources) -> Iterator[Link]:
    """Yield the links of all strings in Python files, and of files with code that tests run."""
    for path, mentions in sources.mentions.items():
        if path == "tests/conftest.py":  # its strings are names of other tests
            continue
        links = [
            link
            for text in mentions.strings
            for link in (_in_product if path.startswith(PRODUCT) else _in_test)(sources, path, text)
        ]
        asking = fnmatch_filter(sources.tests, TABLES[path]) if path in TABLES else [path]
        yield from (link._replace(path=each) for each in asking for link in links)
        for place in mentions.places:
            yield from _opened(sources, path, place)
    for path in sources.files:
        if any(fnmatch(path, pattern) for pattern in CODE):
            yield from _code(sources, path, sources.text(path))


def _in_product(sources: Sources, path: str, text: str) -> Iterator[Link]:
    """Yield the links of a string in a package: it is a reference, a program, or data of the package; or a message."""
    if _REFERENCE.fullmatch(text):
        yield from named_modules(sources, path, text)
    elif "\n" in text or ";" in text:
        yield from _code(sources, path, text)
    if name := text.strip("/"):
        depth = 1 if path.startswith(PRODUCT[0]) else 2
        for folder in dict.fromkeys(("/".join(path.split("/")[:depth]), posixpath.dirname(path))):
            for file in (*sources.named(path, f"{folder}/{name}"), *sources.inside(f"{folder}/{name}")):
                if not file.endswith(".py"):
                    yield Link(path, file, f"names {text}")


def _in_test(sources: Sources, path: str, text: str) -> Iterator[Link]:
    """Yield the links of a string in a test, or in what tests run."""
    yield from named_modules(sources, path, text)
    yield from _code(sources, path, text)
    if text.isidentifier() and text != "__main__":
        yield from (Link(path, target, f"names {text}") for target in sources.beside(path, text))
    for finder, name, target in sources.entry_points:
        mentions = sources.mentions[path]
        is_meant = finder in text or finder in mentions.strings or mentions.imports_from(finder)
        if name in (text, *_QUOTED.findall(text)) and is_meant:
            yield from named_modules(sources, path, target, f"names the entry point {name}")
    for name in _FILE.findall(text):
        yield from _named_files(sources, path, name.removesuffix(".").removeprefix("./"))


def named_modules(sources: Sources, path: str, text: str, reason: str = "") -> Iterator[Link]:
    """Yield the links to modules that a text names: "a.b", "a.b:Name", or "a.b." before a name that is computed."""
    modules = sources.project.modules
    for dotted in [text] if text in modules else _DOTTED.findall(text):
        parts = dotted.split(".")
        lengths = [length for length in range(1, len(parts) + 1) if ".".join(parts[:length]) in modules]
        if lengths:
            module, name = ".".join(parts[: lengths[-1]]), "".join(parts[lengths[-1] :][:1])
            targets = [*sources.module(module, name or "__main__")]
        else:
            targets = [] if path.startswith(PRODUCT) else sources.beside(path, dotted)
        yield from (Link(path, target, reason or f"names {dotted}") for target in targets)
    if text.endswith(".") and text[:-1] in modules:
        yield from _any_in(sources, path, text[:-1])


def _any_in(sources: Sources, path: str, package: str) -> Iterator[Link]:
    """Yield links to all modules of a package."""
    for name, module in sources.project.modules.items():
        if name.rpartition(".")[0] == package:
            yield Link(path, module.path, f"names a module of {package}")


def _code(sources: Sources, path: str, text: str) -> Iterator[Link]:
    """Yield the links to what code in a text imports, and to modules of which it names a part, as in "a.{name}"."""
    for module, names in _FROM.findall(text):
        for name in re.findall(r"(?:^|,)\s*(\w+)", names.strip("( \n")):
            whole = f"{module}.{name}"
            target = (whole, "") if whole in sources.project.modules else (module, name)
            yield from imported(sources, path, *target)
    for modules in _IMPORT.findall(_FROM.sub("", text)):
        for module in re.findall(r"(?:^|,)\s*([\w.]+)", modules):
            yield from imported(sources, path, module)
    for package in _COMPUTED.findall(text):
        yield from _any_in(sources, path, package)


def _named_files(sources: Sources, path: str, name: str) -> Iterator[Link]:
    if name.endswith("/"):
        if not name.startswith((*PRODUCT, "tests/")):
            yield from _opened(sources, path, name[:-1])
    elif "/" in name or "." in name or name[:1].isupper():
        for file in sources.named(path, name):
            # Made-up projects in tests have a plugin.py, too.
            if "/" in name or not (file.endswith(".py") and file.startswith(PRODUCT)):
                yield Link(path, file, f"names {name}")


def _opened(sources: Sources, path: str, place: str) -> Iterator[Link]:
    """Yield the links to a file, or to all files of a folder, that a file opens.

    What is in folders of packages, and in those with tests, it reads, and does not run.
    """
    files = sources.inside(place)
    is_alone = f"{place}/".startswith(PRODUCT) or not sources.tests.isdisjoint(files)
    yield from (Link(path, file, f"reads {place}/", is_alone) for file in files)
    if not files:
        yield Link(path, place, f"reads {place}")
