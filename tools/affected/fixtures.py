"""A test depends on each conftest.py above it, on the plugins of pytest named there, and on what its fixtures use.

What a module of fixtures uses in turn matters to those who name one of its fixtures. To the others it matters only
whether the module can be imported, unless it has hooks or fixtures that are used without being named.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from tools.affected.graph import Link
from tools.affected.sources import PRODUCT, Sources


def fixture_links(sources: Sources) -> Iterator[Link]:
    """Yield the links to files with fixtures."""
    for path, mentions in sources.mentions.items():
        is_product = path.startswith(PRODUCT)
        if is_product and not mentions.imports_from("pytest"):
            continue
        for file in fixture_files(sources, path):
            theirs = sources.mentions[file]
            if is_product and not file.startswith(PRODUCT):
                continue
            if names := sorted(theirs.fixtures & mentions.requested):
                yield Link(path, file, f"uses the fixture {names[0]}")
            if path in sources.tests:
                yield Link(path, file, f"is below {file}", is_alone=not theirs.is_for_all)


def fixture_files(sources: Sources, path: str) -> Iterator[str]:
    """Yield each conftest.py that applies to a file, and the modules in its `pytest_plugins`."""
    folder = path if path.startswith("tests/") else "tests/any"
    while folder := posixpath.dirname(folder):
        if (file := f"{folder}/conftest.py") in sources.mentions:
            yield file
            for plugin in sources.mentions[file].plugins:
                in_package = sources.project.modules.get(plugin)
                yield from [in_package.path] if in_package else sources.beside(file, plugin)
