"""tools/check_imports.py on small made-up projects, and on this one."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_imports", ROOT / "tools" / "check_imports.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_imports"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def violations(tool: ModuleType, tmp_path: Path) -> Callable[..., list[str]]:
    """Write one file into an otherwise empty project and return what the tool finds."""

    def check(name: str, code: str) -> list[str]:
        (tmp_path / "setup.cfg").write_text("[options.entry_points]\nunidist =\n    some = unidist_some.plugin\n")
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(code)
        found: list[str] = tool.check(tmp_path)
        return found

    return check


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("unidist/x.py", "import torch.nn"),
        ("unidist/deep/x.py", "def f():\n    from keras import ops\n"),
        ("unidist/deep/torch.py", "import torch"),
        ("unidist/x.py", "if TYPE_CHECKING:\n    import tensorflow\n"),
        ("unidist/x.py", "from unidist_some import thing"),
        ("launch/unidist_launch/x.py", "def f():\n    import numpy\n"),
        ("plugins/unidist_some/x.py", "import unidist_launch.launchers.local"),
        ("plugins/unidist_some/plugin.py", "import numpy"),
        ("adapters/unidist_torch/x.py", "import unidist_some"),
    ],
)
def test_a_forbidden_import_is_found(violations: Callable[..., list[str]], name: str, code: str) -> None:
    (found,) = violations(name, code)
    assert found.startswith(f"{name}:{code.count(chr(10)) or 1}: imports ")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("unidist/torch.py", "from unidist_torch import x"),
        ("unidist/tensorflow/keras/x.py", "from unidist_tensorflow import x"),
        ("unidist/x.py", "import numpy, unidist.buffer"),
        ("unidist/x.py", "from . import torch"),
        ("plugins/unidist_some/plugin.py", "def f():\n    import torch\n"),
        ("plugins/unidist_some/_torch.py", "import torch, unidist_torch"),
        ("adapters/unidist_torch/x.py", "import torch, unidist_torch.memory"),
    ],
)
def test_an_allowed_import_is_not_reported(violations: Callable[..., list[str]], name: str, code: str) -> None:
    assert violations(name, code) == []


def test_this_project_has_no_violation(tool: ModuleType) -> None:
    assert tool.check(ROOT) == []
