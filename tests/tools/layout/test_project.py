"""Reading a project: which modules it has, what they import, and who defines a name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.layout.project import read_project

Write = Callable[[dict[str, str]], Path]


@pytest.mark.parametrize(
    ("statement", "module", "name"),
    [
        ("import unidist.low.leaf", "unidist.low.leaf", ""),
        ("from unidist.low import leaf", "unidist.low.leaf", ""),
        ("from unidist.low.leaf import f", "unidist.low.leaf", "f"),
        ("from ..low.leaf import f", "unidist.low.leaf", "f"),
        ("from . import x", "unidist.high.x", ""),
        ("def g():\n    from unidist.low.leaf import f", "unidist.low.leaf", "f"),
        ("if TYPE_CHECKING:\n    from unidist.low.leaf import f", "unidist.low.leaf", "f"),
        ("importlib.import_module('unidist.low.leaf')", "unidist.low.leaf", ""),
        ("import_module('unidist.low.leaf')", "unidist.low.leaf", ""),
    ],
)
def test_every_form_of_an_import_is_read(write: Write, statement: str, module: str, name: str) -> None:
    project = read_project(write({"unidist/low/leaf.py": "def f(): ...", "unidist/high/x.py": statement}))
    (found,) = project.modules["unidist.high.x"].imports
    assert (found.module, found.name) == (module, name)
    assert found.at_import is not statement.startswith(("def", "if"))


@pytest.mark.parametrize("statement", ["importlib.import_module(name)", "resolve('unidist.low.leaf:f')", "x = 1"])
def test_a_path_in_a_string_is_no_import(write: Write, statement: str) -> None:
    project = read_project(write({"unidist/low/leaf.py": "", "unidist/x.py": statement}))
    assert project.modules["unidist.x"].imports == ()


@pytest.mark.parametrize(
    "face",
    [
        "from unidist.low.leaf import f",
        "from unidist.low.leaf import g as f",
        "if TYPE_CHECKING:\n    from unidist.low.leaf import f\ndef __getattr__(name): ...",
        "from unidist.low.deep import f",
    ],
)
def test_a_name_is_defined_where_the_packages_on_the_way_take_it_from(write: Write, face: str) -> None:
    files = {
        "unidist/low/leaf.py": "def f(): ...\ng = f",
        "unidist/low/deep/__init__.py": "from unidist.low.leaf import f",
        "unidist/low/__init__.py": face,
    }
    assert read_project(write(files)).definer("unidist.low", "f") == "unidist.low.leaf"


def test_a_name_that_a_package_defines_is_defined_there(write: Write) -> None:
    files = {"unidist/low/__init__.py": "from unidist.low.leaf import g\nf = 1", "unidist/low/leaf.py": "g = 1"}
    assert read_project(write(files)).definer("unidist.low", "f") == "unidist.low"


def test_packages_that_take_a_name_from_each_other_do_not_trap_the_search(write: Write) -> None:
    files = {"unidist/a/__init__.py": "from unidist.b import f", "unidist/b/__init__.py": "from unidist.a import f"}
    assert read_project(write(files)).definer("unidist.a", "f") in ("unidist.a", "unidist.b")


def test_all_areas_are_read(write: Write) -> None:
    names = ["unidist/x.py", "adapters/unidist_a/x.py", "plugins/unidist_p/deep/x.py", "launch/unidist_launch/x.py"]
    project = read_project(write(dict.fromkeys(names, "")))
    assert project.packages == {"unidist", "unidist_a", "unidist_p", "unidist_launch"}
    assert project.modules["unidist_p.deep.x"].folder == "unidist_p.deep"
    assert project.modules["unidist_p.deep"].is_package


def test_public_names_are_those_of_all_additions_to_all(write: Write) -> None:
    text = "__all__: list[str] = ['a', *other]\n__all__ += ['b']\nother = ['c']"
    assert read_project(write({"unidist/x.py": text})).modules["unidist.x"].public == {"a", "b"}
