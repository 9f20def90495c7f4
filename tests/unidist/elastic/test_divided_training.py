"""What an elastic job whose model is divided asks for before it trains; the adapters' tests train."""

from __future__ import annotations

import pytest

from unidist.elastic.divided_training import check_is_known
from unidist.errors import ConfigurationError
from unidist.runtime.plugin_manager import PluginManager
from unidist.strategy.interface import Plan
from unidist.strategy.plan import build, make_plan


def planned(line: str) -> Plan:
    registry = PluginManager().load().strategies
    return make_plan(build(line, registry), 4, registry)


def test_the_launcher_has_to_know_that_the_model_is_divided() -> None:
    check_is_known(planned("tensor=2,zero=1"), planned("tensor=2,zero=1"))
    with pytest.raises(ConfigurationError, match=r"the script divides the model by tensor\. The launcher, which"):
        check_is_known(planned("tensor=2"), planned("data"))
