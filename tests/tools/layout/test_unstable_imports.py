"""Unstable parts of frameworks, and the modules that may use them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.layout.project import read_project
from tools.layout.unstable_imports import check_unstable_imports

Write = Callable[[dict[str, str]], Path]
FILES = {
    "pyproject.toml": '[tool.unidist.layout.unstable.jax]\nparts = ["jax._src"]\nmodules = ["unidist_a.order"]\n',
    "adapters/unidist_a/order.py": '"""Relies on core, since 0.10."""\nfrom jax._src import core\n',
}


@pytest.mark.parametrize(
    "code",
    [
        "from jax._src import core",
        "from jax import _src",
        "import jax._src.core as c",
        "def f():\n    import jax._src",
        "import jax\nx = jax._src.core.Jaxpr",
        'importlib.import_module("jax._src.core")',
    ],
)
def test_a_use_elsewhere_is_found(write: Write, code: str) -> None:
    (found, *_) = check_unstable_imports(read_project(write({**FILES, "plugins/unidist_p/x.py": code})))
    assert found.startswith(f"plugins/unidist_p/x.py:{code.count(chr(10)) + 1}: uses jax._src")
    assert found.endswith("; that is for unidist_a.order alone")


def test_what_is_listed_or_stable_is_not_reported(write: Write) -> None:
    stable = "import jax, jax.numpy\nfrom jax_src import x\nx = jax.core.Tracer, other._src"
    assert check_unstable_imports(read_project(write({**FILES, "plugins/unidist_p/x.py": stable}))) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from jax._src import core", 'adapters/unidist_a/order.py:1: say what it "Relies on" of jax'),
        (
            '"""Relies on nothing."""',
            "pyproject.toml:1: unidist_a.order uses no unstable part of jax; take it off the list",
        ),
    ],
)
def test_a_listed_module_uses_a_part_and_says_so(write: Write, text: str, found: str) -> None:
    assert check_unstable_imports(read_project(write({**FILES, "adapters/unidist_a/order.py": text}))) == [found]
