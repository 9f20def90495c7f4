"""The sample plugin must be installed as a user would install it, not merely be importable."""

from __future__ import annotations

import filecmp
import importlib.metadata
from pathlib import Path

import pytest

from unidist.runtime.plugin_manager import PluginManager

SOURCES = Path(__file__).parent / "unidist_sample" / "unidist_sample"
REMEDY = "`make test` installs it; by hand: pip install --no-deps --force-reinstall ./tests/third_party/unidist_sample"


@pytest.fixture(scope="session", autouse=True)
def _sample_is_installed() -> None:
    try:
        distribution = importlib.metadata.distribution("unidist-sample-plugin")
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(f"the sample plugin is not installed. {REMEDY}", pytrace=False)
    for source in SOURCES.glob("*.py"):
        installed = Path(str(distribution.locate_file(f"unidist_sample/{source.name}")))
        if not installed.exists() or not filecmp.cmp(source, installed, shallow=False):
            pytest.fail(
                f"the installed sample plugin is not that of the sources ({source.name}). {REMEDY}", pytrace=False
            )


@pytest.fixture(scope="session")
def manager(_sample_is_installed: None) -> PluginManager:
    """A plugin manager that has read the entry points."""
    return PluginManager().load()
