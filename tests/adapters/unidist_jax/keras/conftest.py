"""Keras runs on JAX in these tests and in their ranks, which import `_keras_training`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")
os.environ["KERAS_BACKEND"] = "jax"  # nothing else in this environment runs Keras
pytest.importorskip("keras")
sys.path.insert(0, str(Path(__file__).parent))
