"""The adapter of JAX against the contract of frameworks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unidist.testing import FrameworkConformance

jax = pytest.importorskip("jax", reason="the adapter is JAX's")


@pytest.fixture(autouse=True)
def _in_64_bits() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


class TestJax(FrameworkConformance):
    framework = "jax"
