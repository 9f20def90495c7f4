"""The `__init__` of each folder gives the names that it lists, and no others."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FACES = sorted(
    ".".join(path.parent.relative_to(ROOT if area == "unidist" else ROOT / area).parts)
    for area in ("unidist", "adapters", "plugins", "launch")
    for path in (ROOT / area).rglob("__init__.py")
    if "lazy_names(" in path.read_text(encoding="utf-8")
)


LIBRARIES = {
    "unidist_lightning": "lightning",
    "unidist_local_sgd.jax": "jax",
    "unidist_parameter_server.jax": "jax",
    "unidist_torch_backend.torchft": "torchft",
    "unidist_transformers": "transformers",
}
"""What the names of a plugin need, and not every environment has."""


@pytest.mark.parametrize("face", FACES)
def test_every_listed_name_is_there_once(face: str) -> None:
    if face in LIBRARIES:
        pytest.importorskip(LIBRARIES[face])
    if face.startswith("unidist_ray"):
        pytest.importorskip("ray", reason="ray is not installed; `make test-integrations` has it")
    if face.startswith("unidist_spark"):
        pytest.importorskip("pyspark", reason="pyspark is not installed; `make test-integrations` has it")
    package = importlib.import_module(face)
    assert len(package.__all__) == len(set(package.__all__))
    for name in package.__all__:
        assert hasattr(package, name), name
    with pytest.raises(AttributeError, match=f"{face}.*no_such_name"):
        package.no_such_name  # noqa: B018 - asking is the test


@pytest.mark.parametrize("face", FACES)
def test_type_checkers_see_the_same_names(face: str) -> None:
    file = importlib.import_module(face).__file__
    assert file is not None
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    seen = {
        alias.asname or alias.name
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == set(importlib.import_module(face).__all__)
