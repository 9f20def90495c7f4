"""Names that plugins add to `unidist.torch` and its like."""

from __future__ import annotations

import math
import sys
import types

import pytest

from unidist import hookimpl
from unidist.facade import FacadeNameSpec
from unidist.registry import Registry
from unidist.runtime import context
from unidist.runtime.facade_names import facade_names
from unidist.runtime.plugin_manager import PluginManager


class Plugin:
    """A third party's."""

    @hookimpl
    def unidist_register_facade_names(self, registry: Registry[FacadeNameSpec]) -> None:
        registry.add(FacadeNameSpec("frame", "pi", "math:pi"))
        registry.add(FacadeNameSpec("frame", "numbers", "math"))
        registry.add(FacadeNameSpec("frame", "broken", "math:no_such_name"))
        registry.add(FacadeNameSpec("other", "inf", "math:inf"))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    manager = PluginManager()
    manager.register(Plugin(), name="third")
    monkeypatch.setattr(context, "plugins", lambda: manager)
    made = types.ModuleType("unidist.frame")
    made.own = 1  # type: ignore[attr-defined]
    made.__getattr__, made.__dir__ = facade_names(  # type: ignore[method-assign]
        "unidist.frame", {"math": "e tau", "math:floor": "rounded"}
    )
    monkeypatch.setitem(sys.modules, "unidist.frame", made)
    return made


def test_a_plugins_names_are_there_when_they_are_asked_for(module: types.ModuleType) -> None:
    assert {"own", "pi", "numbers"} <= set(dir(module))
    assert "inf" not in dir(module)
    assert "pi" not in vars(module)
    assert module.pi == math.pi
    assert module.numbers is math
    assert "pi" in vars(module)


def test_names_of_its_own_are_found_without_plugins(module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "plugins", lambda: pytest.fail("plugins were loaded"))
    assert module.e == math.e
    assert module.rounded is math.floor
    assert {"e", "rounded"} <= vars(module).keys()


@pytest.mark.parametrize("name", ["inf", "nothing", "_private"])
def test_other_names_are_not(module: types.ModuleType, name: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
        getattr(module, name)


def test_one_that_cannot_be_imported_says_whose_it_is(module: types.ModuleType) -> None:
    with pytest.raises(Exception, match=r"unidist\.frame\.broken"):
        module.broken  # noqa: B018 - asking is the test
