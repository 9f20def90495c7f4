"""Fixtures for every test: the public test kit's own."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

# The same examples in every run, and no limit of time for one: a failure has to mean that something is wrong.
# To look for new examples: --hypothesis-profile=default
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("repeatable")

pytest_plugins = ["unidist.testing.fixtures"]

sys.path.insert(0, str(Path(__file__).parent / "helpers"))  # what several folders share; the ranks get this path too
