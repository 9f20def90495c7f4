"""Fixtures for every test: the public test kit's own."""

from __future__ import annotations

import sys
from pathlib import Path

pytest_plugins = ["unidist.testing.fixtures"]

sys.path.insert(0, str(Path(__file__).parent / "helpers"))  # what several folders share; the ranks get this path too
