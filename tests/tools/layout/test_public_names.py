"""Imports of names that another package does not list."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.layout.project import read_project
from tools.layout.public_names import check_public_names

Write = Callable[[dict[str, str]], Path]

CORE = {
    "unidist/__init__.py": "__all__ = ['engine', 'run']\nfrom unidist.strategy.plan import run",
    "unidist/engine.py": "__all__ = ['Engine']\nclass Engine: ...\nclass Hidden: ...",
    "unidist/errors.py": "__all__ = ['Oops']\nclass Oops: ...",
    "unidist/strategy/__init__.py": """\
        __all__ = ["parse", "Plan"]
        if TYPE_CHECKING:
            from unidist.strategy.plan import Plan, parse
        """,
    "unidist/strategy/plan.py": "class Plan: ...\ndef parse(): ...\ndef run(): ...\ndef helper(): ...",
    "unidist/strategy/deep/__init__.py": "",
    "unidist/strategy/deep/leaf.py": "parse = 1",
    "unidist/empty/__init__.py": "",
}
WHO = ["plugins/unidist_p/x.py", "adapters/unidist_a/x.py", "launch/unidist_launch/x.py"]


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("from unidist.strategy.plan import helper", "unidist.strategy.plan.helper"),
        ("from unidist.strategy import helper", "unidist.strategy.helper"),
        ("from unidist.strategy import plan", "unidist.strategy.plan"),
        ("import unidist.strategy.plan", "unidist.strategy.plan"),
        ("from unidist.strategy.deep.leaf import parse", "unidist.strategy.deep.leaf.parse"),
        ("from unidist.engine import Hidden", "unidist.engine.Hidden"),
        ("from unidist.errors import Oops", "unidist.errors.Oops"),
        ("from unidist import errors", "unidist.errors"),
        ("import unidist.empty", "unidist.empty"),
        ("from unidist import missing", "unidist.missing"),
        ("def f():\n    from unidist.strategy.plan import helper", "unidist.strategy.plan.helper"),
        ("if TYPE_CHECKING:\n    from unidist.strategy.plan import helper", "unidist.strategy.plan.helper"),
        ("importlib.import_module('unidist.strategy.plan')", "unidist.strategy.plan"),
    ],
)
def test_a_name_that_no_list_has_is_found(write: Write, who: str, code: str, named: str) -> None:
    found = check_public_names(read_project(write({**CORE, who: code})))
    assert found == [f"{who}:{code.count(chr(10)) + 1}: imports {named}, which no __all__ lists"]


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize(
    "code",
    [
        "from unidist.strategy import parse",
        "from unidist.strategy.plan import parse",
        "from unidist.strategy.plan import run",  # listed further up
        "from unidist import run, engine",
        "import unidist, unidist.strategy, unidist.engine",
        "from unidist.engine import Engine",
        "import numpy, torch",
    ],
)
def test_a_public_name_is_not_reported(write: Write, who: str, code: str) -> None:
    assert check_public_names(read_project(write({**CORE, who: code}))) == []


def test_a_package_may_import_anything_of_its_own_and_the_core_is_not_asked(write: Write) -> None:
    own = {"plugins/unidist_p/x.py": "from unidist_p.y import f", "plugins/unidist_p/y.py": "def f(): ..."}
    files = {**CORE, **own, "unidist/torch.py": "from unidist_p.y import f"}
    assert check_public_names(read_project(write(files))) == []


def test_names_of_other_plugins_and_adapters_are_held_to_the_same(write: Write) -> None:
    files = {"adapters/unidist_a/y.py": "def f(): ...", "plugins/unidist_p/x.py": "from unidist_a.y import f"}
    assert len(check_public_names(read_project(write(files)))) == 1
    files["adapters/unidist_a/__init__.py"] = "from unidist_a.y import f\n__all__ = ['f']"
    assert check_public_names(read_project(write(files))) == []
