"""Docstrings of folders that list what the folder imports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.layout.project import read_project
from tools.layout.stated_imports import check_stated_imports

Write = Callable[[dict[str, str]], Path]

FILES = {
    "unidist/buffer.py": "",
    "unidist/low/memory.py": "import unidist.buffer",
    "unidist/low/other.py": "",
    "unidist/middle/engine.py": "import unidist.low.memory\nimport unidist.buffer",
    "unidist/high/training.py": "import unidist.middle.engine\nimport unidist.low.memory",
    "unidist/high/parts/one.py": "",
    "unidist/high/whole.py": "from unidist.high.parts import one",
}


def problems(write: Write, folder: str, docstring: str) -> list[str]:
    root = write(FILES)
    (root / "unidist" / folder / "__init__.py").write_text(f'"""A folder. {docstring}\n"""\n')
    return check_stated_imports(read_project(root))


@pytest.mark.parametrize(
    ("folder", "docstring"),
    [
        ("low", ""),
        ("low", "Imports the root only."),
        ("low", "Imports `buffer` alone: nothing else."),
        ("low", "Imports no framework, ever."),
        ("low", "May import the modules at the root of this package, and no other folder."),
        ("low", "Imports the root,\n    the PyTorch adapter, the core and numpy."),
        ("middle", "Imports `low` and the root."),
        ("middle", "Imports `low.memory` and the root. Loaded early."),
        ("middle", "May import `low`, `high` and the root."),
        ("high", "Imports `middle`, `parts` below and the folders below."),
        ("high", "Imports `middle`, `low` and `high.parts`."),
        ("high", "Imports all folders below."),
        ("high/parts", "Imports no other folder."),
        ("high/parts", "Imports nothing."),
    ],
)
def test_true_lists(write: Write, folder: str, docstring: str) -> None:
    assert problems(write, folder, docstring) == []


@pytest.mark.parametrize(
    ("folder", "docstring", "problem"),
    [
        ("low", "Imports nothing.", "it imports the root, which its docstring does not list"),
        ("low", "Imports `high` and the root.", "says that it imports `high`, and it does not"),
        ("low", "Imports `lower` and the root.", "`lower`, and there is no such folder or module"),
        ("high/parts", "Imports the root.", "says that it imports the root, and it does not"),
        ("middle", "Imports the root.", "it imports unidist.low, which its docstring does not list"),
        ("middle", "May import the root.", "it imports unidist.low, which its docstring does not list"),
        ("middle", "Imports `low.other` and the root.", "says that it imports `low.other`, and it does not"),
        ("high", "Imports `middle` and the folders below.", "it imports unidist.high.parts"),
        ("low", "Imports what it needs.", 'says "imports what it needs"; say it in the words of'),
        ("low", "Imports the root, but not `high`.", 'says "imports but not `high`"; say it in the words of'),
    ],
)
def test_lists_that_are_wrong(write: Write, folder: str, docstring: str, problem: str) -> None:
    found = problems(write, folder, docstring)
    assert found
    assert all(each.startswith(f"unidist/{folder}/__init__.py:1: ") for each in found)
    assert problem in found[0]


def test_whole_packages_and_facades_say_something_else(write: Write) -> None:
    root = write({"plugins/unidist_x/a.py": "", "unidist/torch/a.py": "import unidist.low", **FILES})
    (root / "plugins/unidist_x/__init__.py").write_text('"""A plugin. Imports the core, and each binding its own."""')
    assert check_stated_imports(read_project(root)) == []
