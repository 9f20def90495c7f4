"""launch -> core <- adapters <- plugins, no framework in the core, light plugin modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tools.layout.directions import check_directions
from tools.layout.project import read_project

Write = Callable[[dict[str, str]], Path]
SETUP = "[options.entry_points]\nunidist =\n    some = unidist_some.plugin\n"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("unidist/x.py", "import torch.nn"),
        ("unidist/deep/x.py", "def f():\n    from keras import ops\n"),
        ("unidist/deep/torch.py", "import torch"),
        ("unidist/x.py", "if TYPE_CHECKING:\n    import tensorflow\n"),
        ("unidist/x.py", "from unidist_some import thing, other"),
        ("launch/unidist_launch/x.py", "def f():\n    import numpy\n"),
        ("launch/unidist_launch/x.py", "import unidist_some"),
        ("launch/unidist_launch/x.py", "import unidist_torch"),
        ("plugins/unidist_some/x.py", "import unidist_launch.launchers.local"),
        ("plugins/unidist_some/plugin.py", "import numpy"),
        ("adapters/unidist_torch/x.py", "import unidist_some"),
        ("adapters/unidist_torch/x.py", "import unidist_launch"),
        ("adapters/unidist_arrays/x.py", "import unidist_torch"),
    ],
)
def test_an_import_in_the_wrong_direction_is_found(write: Write, name: str, code: str) -> None:
    (found,) = check_directions(read_project(write({"setup.cfg": SETUP, name: code})))
    assert found.startswith(f"{name}:{code.count(chr(10)) or 1}: imports ")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("unidist/torch.py", "from unidist_torch import x"),
        ("unidist/tensorflow/keras/x.py", "from unidist_tensorflow import x"),
        ("unidist/x.py", "import numpy, unidist.buffer"),
        ("unidist/x.py", "from . import torch"),
        ("launch/unidist_launch/x.py", "import unidist_launch.y, unidist.jobs"),
        ("plugins/unidist_slurm/x.py", "import unidist_launch.launchers.local"),
        ("plugins/unidist_some/plugin.py", "def f():\n    import torch\n"),
        ("plugins/unidist_some/_torch.py", "import torch, unidist_torch"),
        ("adapters/unidist_torch/x.py", "import torch, unidist_torch.memory"),
        ("adapters/unidist_torch/x.py", "import unidist_arrays.memory"),
    ],
)
def test_an_import_in_the_right_direction_is_not_reported(write: Write, name: str, code: str) -> None:
    assert check_directions(read_project(write({"setup.cfg": SETUP, name: code}))) == []
