"""Modules that are in sys.modules under several names."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType

import pytest

from unidist.jobs.pool._pickling import dump_call
from unidist.strategy import plan as strategy_spec


def test_a_module_with_second_names_in_another_package_is_left_to_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("nowhere_to_be_found.callbacks")
    monkeypatch.setitem(sys.modules, "nowhere_to_be_found.callbacks", module)
    for alias in ("unidist.first_alias", "unidist.second_alias"):
        monkeypatch.setitem(sys.modules, alias, module)
    function, args, _ = pickle.loads(dump_call(strategy_spec.parse, ("accumulate=2",), {}))
    assert function is strategy_spec.parse
    assert args == ("accumulate=2",)


def test_a_module_with_a_second_name_in_its_own_package_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("unidist.nowhere_to_be_found")  # which no worker could import
    for name in (module.__name__, "unidist.alias"):
        monkeypatch.setitem(sys.modules, name, module)
    function, _, _ = pickle.loads(dump_call(strategy_spec.parse, ("accumulate=2",), {}))
    assert function is strategy_spec.parse
