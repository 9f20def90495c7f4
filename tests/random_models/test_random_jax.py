"""Random functions in JAX, as `test_random_models` has models: in an environment of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="the functions are in JAX")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _jax_random import VOCABULARY
from _random_runs import check_many

pytestmark = [pytest.mark.parallel, pytest.mark.soak]


def test_many_programs() -> None:
    check_many("jax", VOCABULARY)
