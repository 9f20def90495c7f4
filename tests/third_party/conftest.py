"""The sample plugins must be installed as a user would install them, not merely be importable."""

from __future__ import annotations

import filecmp
import importlib.metadata
from pathlib import Path

import pytest

from unidist.runtime.plugin_manager import PluginManager

SAMPLES = {"unidist_sample": "unidist-sample-plugin", "unidist_second": "unidist-second-plugin"}


@pytest.fixture(scope="session", autouse=True)
def _samples_are_installed() -> None:
    for package, name in SAMPLES.items():
        folder = Path(__file__).parent / package
        remedy = (
            f"`make test` installs it; by hand: pip install --no-deps --force-reinstall ./tests/third_party/{package}"
        )
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            pytest.fail(f"the sample plugin {name} is not installed. {remedy}", pytrace=False)
        for source in (folder / package).glob("*.py"):
            installed = Path(str(distribution.locate_file(f"{package}/{source.name}")))
            if not installed.exists() or not filecmp.cmp(source, installed, shallow=False):
                pytest.fail(f"the installed {name} is not that of the sources ({source.name}). {remedy}", pytrace=False)


@pytest.fixture(scope="session")
def manager(_samples_are_installed: None) -> PluginManager:
    """A plugin manager that has read the entry points."""
    return PluginManager().load()
