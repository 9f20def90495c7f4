"""Ranks that have Horovod and unidist."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("horovod", reason="Horovod is not installed (`unidist build horovod`)")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks import the cases; they get this process's path
