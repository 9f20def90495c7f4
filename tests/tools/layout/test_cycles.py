"""Folders that import each other, and root modules that import folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.layout.cycles import check_cycles, check_roots, strongly_connected
from tools.layout.project import read_project

Write = Callable[[dict[str, str]], Path]

BACK = [
    "from unidist.high.x import f",
    "from unidist.high import f",
    "def g():\n    import unidist.high.x",
    "if TYPE_CHECKING:\n    from unidist.high.x import F",
    "importlib.import_module('unidist.high.x')",
    "from ..high import x",
]


@pytest.mark.parametrize("back", BACK)
def test_two_folders_that_import_each_other_are_found(write: Write, back: str) -> None:
    files = {"unidist/high/x.py": "from unidist.low.y import g", "unidist/low/y.py": back}
    found = check_cycles(read_project(write(files)))
    line = back.count("\n") + 1
    assert found == [
        "unidist/high/x.py:1: unidist.high imports unidist.low, in the cycle of unidist.high unidist.low",
        f"unidist/low/y.py:{line}: unidist.low imports unidist.high, in the cycle of unidist.high unidist.low",
    ]


@pytest.mark.parametrize("back", BACK)
def test_imports_that_run_down_are_not_reported(write: Write, back: str) -> None:
    files = {"unidist/high/x.py": "", "unidist/low/y.py": back, "unidist/low/z.py": "from unidist.low.y import g"}
    assert check_cycles(read_project(write(files))) == []


def test_several_imports_of_one_folder_are_one_line(write: Write) -> None:
    files = {"unidist/a/x.py": "import unidist.b.x\nimport unidist.b.y", "unidist/b/x.py": "import unidist.a.x"}
    (first, _) = check_cycles(read_project(write({**files, "unidist/b/y.py": ""})))
    assert first == "unidist/a/x.py:1: unidist.a imports unidist.b (and 1 more), in the cycle of unidist.a unidist.b"


def test_a_cycle_over_three_folders_and_one_with_the_root_are_found(write: Write) -> None:
    three = {"unidist/a/x.py": "import unidist.b.x", "unidist/b/x.py": "import unidist.c.x"}
    files = {**three, "unidist/c/x.py": "import unidist.a.x", "adapters/unidist_t/r.py": "import unidist_t.f.x"}
    found = check_cycles(read_project(write({**files, "adapters/unidist_t/f/x.py": "import unidist_t.r"})))
    assert [line.rpartition("of ")[2] for line in found] == ["unidist.a unidist.b unidist.c"] * 3 + [
        "unidist_t unidist_t.f"
    ] * 2


@pytest.mark.parametrize("face", ["{}", "if TYPE_CHECKING:\n    {}\n"])
def test_a_name_counts_where_it_is_defined_not_where_it_is_passed_on(write: Write, face: str) -> None:
    # `a` and `a.deep` would import each other if the name came from a's own face; it comes from `low`.
    files = {
        "unidist/low/y.py": "def g(): ...",
        "unidist/a/__init__.py": face.format("from unidist.low.y import g"),
        "unidist/a/x.py": "import unidist.a.deep.z",
        "unidist/a/deep/z.py": "from unidist.a import g",
    }
    assert check_cycles(read_project(write(files))) == []
    files["unidist/a/__init__.py"] = face.format("from unidist.a.x import g")
    assert len(check_cycles(read_project(write(files)))) == 2


def test_a_package_may_pass_on_what_lies_in_its_folder_and_nothing_else(write: Write) -> None:
    files = {
        "unidist/a/__init__.py": "from unidist.a.deep.z import f\nfrom unidist.a.x import g",
        "unidist/a/x.py": "",
        "unidist/a/deep/z.py": "from unidist.a.x import g",
        "unidist/b/y.py": "import unidist.a.x",
    }
    assert check_cycles(read_project(write(files))) == []
    files["unidist/a/__init__.py"] = "from unidist.b.y import f"
    assert len(check_cycles(read_project(write(files)))) == 2


def test_a_facade_may_import_what_imports_the_core(write: Write) -> None:
    files = {
        "unidist/torch.py": "import unidist.a.x",
        "unidist/a/x.py": "import unidist.errors",
        "unidist/errors.py": "",
    }
    project = read_project(write(files))
    assert check_cycles(project) == []
    assert check_roots(project) == []


def test_a_root_module_that_imports_a_folder_is_found(write: Write) -> None:
    root = write({"unidist/r.py": "x = 1\nfrom unidist.a.x import f", "unidist/a/x.py": "", "unidist/s.py": ""})
    assert check_roots(read_project(root)) == ["unidist/r.py:2: a root module imports the folder unidist.a"]


def test_imports_in_the_root_and_from_folders_are_not_reported(write: Write) -> None:
    files = {"unidist/r.py": "import unidist.s, numpy", "unidist/a/x.py": "import unidist.b.x", "unidist/b/x.py": ""}
    assert check_roots(read_project(write({**files, "unidist/s.py": ""}))) == []


@pytest.mark.parametrize("exception", ["unidist_zero.strategy", "unidist_zero.*"])
def test_an_exception_holds_with_a_reason_and_while_it_is_needed(write: Write, exception: str) -> None:
    table = f'[tool.unidist.layout.roots]\n"{exception}" = '
    files = {"plugins/unidist_zero/strategy.py": "import unidist_zero.a.x", "plugins/unidist_zero/a/x.py": ""}
    assert check_roots(read_project(write({**files, "pyproject.toml": f'{table}"it puts them together"'}))) == []
    (found,) = check_roots(read_project(write({**files, "pyproject.toml": f'{table}""'})))
    assert found == "plugins/unidist_zero/strategy.py:1: a root module imports the folder unidist_zero.a"
    without = {**files, "plugins/unidist_zero/strategy.py": "", "pyproject.toml": f'{table}"a reason"'}
    (found,) = check_roots(read_project(write(without)))
    assert found == f"pyproject.toml:1: needless exception for root modules: {exception}"


def test_cycles_of_a_graph() -> None:
    graph = {"a": ["b"], "b": ["c", "d"], "c": ["a"], "d": ["e"], "e": ["d"], "f": ["a", "f"]}
    assert strongly_connected({node: dict.fromkeys(to) for node, to in graph.items()}) == [["a", "b", "c"], ["d", "e"]]
