"""Small made-up projects for the tools to read, and the way to the tools, which no distribution contains."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))


@pytest.fixture
def write(tmp_path: Path) -> Callable[[dict[str, str]], Path]:
    """Write files, by path and text, and each `__init__.py` that is missing on the way; return the root."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text), encoding="utf-8")
            depth = 1 if name.startswith("unidist/") else 2
            for length in range(depth, len(Path(name).parts)):
                (tmp_path.joinpath(*Path(name).parts[:length]) / "__init__.py").touch()
        return tmp_path

    return write
