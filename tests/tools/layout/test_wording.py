"""Docstrings that read like a translation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.layout.project import read_project
from tools.layout.wording import check_wording

Write = Callable[[dict[str, str]], Path]


def functions(number: int, docstring: str) -> str:
    return "".join(f'def f{index}():\n    """{docstring}"""\n' for index in range(number))


def test_more_than_the_largest_share_is_found(write: Write) -> None:
    plain = {"unidist/plain.py": functions(96, "Return the rank.")}
    assert check_wording(read_project(write({**plain, "unidist/x.py": functions(2, "Start anew.")}))) == []
    found = check_wording(read_project(write({**plain, "unidist/x.py": functions(4, "Start anew.")})))
    assert found == [f'unidist/x.py:{2 * line}: "anew": say it in plain English' for line in range(1, 5)]


@pytest.mark.parametrize(
    ("docstring", "idiom"),
    [
        ("Treats all ranks alike.", "alike"),
        ("Whoever waits\n    is woken.", "Whoever"),
        ("A thread of\n    its own.", "of its own"),
        ("Waits until all come to the barrier.", "come to the"),
        ("Says that there is none.", "that there is"),
        ("Tells what becomes of it.", "what becomes of"),
    ],
)
def test_each_idiom_is_found_in_functions_classes_and_modules(write: Write, docstring: str, idiom: str) -> None:
    text = f'"""{docstring}"""\nclass C:\n    """{docstring}"""\n    def f(self):\n        """{docstring}"""\n'
    found = check_wording(read_project(write({"unidist/x.py": text})))
    assert [line.partition(": ")[2] for line in found] == [f'"{idiom}": say it in plain English'] * 3


@pytest.mark.parametrize("title", ["What a rank knows.", "How data moves.", "Where files lie.", "Who waits."])
def test_a_relative_clause_is_no_title_of_a_module_or_class(write: Write, title: str) -> None:
    assert len(check_wording(read_project(write({"unidist/x.py": f'"""{title}"""'})))) == 1
    assert len(check_wording(read_project(write({"unidist/x.py": f'class C:\n    """{title}"""\n'})))) == 1
    assert check_wording(read_project(write({"unidist/x.py": f'def f():\n    """{title}"""\n'}))) == []


def test_a_docstring_that_only_refers_to_another_is_not_counted(write: Write) -> None:
    references = functions(200, "See `Engine.close`.")
    assert check_wording(read_project(write({"unidist/x.py": functions(1, "Start anew."), "unidist/y.py": references})))
    longer = functions(200, "See `Engine.close`. Also stops the thread.")
    assert check_wording(read_project(write({"unidist/y.py": longer}))) == []
