"""A version of JAX that was not tested is one line that says what to install, before anything else fails."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

from unidist.errors import ConfigurationError
from unidist_jax.versions import check_version
from unidist_jax.xla_engine import XlaEngine


@pytest.mark.parametrize("version", ["0.9.2", "0.12.0.1", "0.13.0.dev20270101", "1.0"])
def test_another_version_is_refused_with_the_range(version: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"jax >= 0\.10, < 0\.12, and {version} is installed: pip install 'jax>"
    ):
        check_version(version)


@pytest.mark.parametrize("version", ["0.10.0", "0.11.2", "0.11.0.dev20260101"])
def test_the_tested_versions_are_accepted(version: str) -> None:
    check_version(version)


def test_the_adapter_checks_before_it_imports_private_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.99.0")
    spec = importlib.util.find_spec("unidist_jax.compiled")
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ConfigurationError, match=r"0\.99\.0 is installed"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert "0.99.0 is installed" in XlaEngine().availability().reason
