"""Folders with too many modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.layout.project import read_project
from tools.layout.sizes import check_sizes

Write = Callable[[dict[str, str]], Path]


@pytest.mark.parametrize(("folder", "most"), [("unidist", 20), ("unidist/a", 16), ("plugins/unidist_p", 16)])
def test_a_module_too_many_is_found(write: Write, folder: str, most: int) -> None:
    files = {f"{folder}/m{number}.py": "" for number in range(most)}
    assert check_sizes(read_project(write(files))) == []
    found = check_sizes(read_project(write({f"{folder}/one_more.py": ""})))
    assert found == [f"{folder}/__init__.py:1: {most + 1} modules in one folder, at most {most}"]


def test_facades_and_folders_inside_are_not_counted(write: Write) -> None:
    files = {f"unidist/m{number}.py": "" for number in range(20)}
    more = dict.fromkeys(["unidist/torch.py", "unidist/keras/x.py", "unidist/a/x.py"], "")
    assert check_sizes(read_project(write({**files, **more}))) == []
