"""Facades of libraries that are not installed say in one line what to install."""

from __future__ import annotations

import importlib
import sys

import pytest

from unidist.installation import install_command


@pytest.mark.parametrize(
    ("facade", "plugin", "library"), [("ray", "unidist_ray", "ray"), ("spark", "unidist_spark", "pyspark")]
)
def test_it_says_what_to_install(facade: str, plugin: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith((f"unidist.{facade}", plugin, f"{library}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError) as missing:
        importlib.import_module(f"unidist.{facade}")
    assert str(missing.value).endswith(f": {install_command(f'unidist-train[{facade}]')}")
    assert "\n" not in str(missing.value)
