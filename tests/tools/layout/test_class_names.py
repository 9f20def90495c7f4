"""Class names that stand for several things."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.layout.class_names import check_class_names
from tools.layout.project import read_project

Write = Callable[[dict[str, str]], Path]

PAGE = "class Page: ..."


@pytest.mark.parametrize(
    "paths",
    [
        ["unidist/a.py", "unidist/b.py"],
        ["unidist/a.py", "adapters/unidist_torch/x.py", "adapters/unidist_jax/x.py", "adapters/unidist_keras/x.py"],
        ["plugins/unidist_p/a.py", *(f"plugins/unidist_p/_{name}/b.py" for name in ("torch", "jax", "tensorflow"))],
    ],
)
def test_two_classes_and_counterparts_in_frameworks_may_share_a_name(write: Write, paths: list[str]) -> None:
    assert check_class_names(read_project(write(dict.fromkeys(paths, PAGE)))) == []


def test_three_things_of_one_name_are_found(write: Write) -> None:
    paths = ["unidist/a.py", "launch/unidist_launch/b.py", "plugins/unidist_p/_torch/c.py"]
    found = check_class_names(read_project(write(dict.fromkeys(paths, PAGE))))
    assert sorted(found) == sorted(f"{path}:1: 3 modules define Page: say of what this one is" for path in paths)


@pytest.mark.parametrize("code", ["class _Page: ...", "def f():\n    class Page: ..."])
def test_names_that_no_other_module_sees_are_free(write: Write, code: str) -> None:
    assert check_class_names(read_project(write({f"unidist/{name}.py": code for name in "abc"}))) == []
