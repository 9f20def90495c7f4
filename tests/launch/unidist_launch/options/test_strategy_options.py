"""`--servers N` is an option of the strategy that has server processes."""

from __future__ import annotations

import pytest

from unidist.errors import ConfigurationError
from unidist.runtime.plugin_manager import PluginManager
from unidist.strategy import StrategySpec
from unidist_launch.options.strategy_options import with_strategy_options


def line(text: str, number: int) -> str:
    return with_strategy_options(text, {"servers": number}, PluginManager().load().registry(StrategySpec))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("parameter_server=async", "parameter_server=async:servers=2"),
        ("clip_value=1, parameter_server=sync:backup=1", "clip_value=1,parameter_server=sync:backup=1:servers=2"),
        ("parameter_server=async:servers=2", "parameter_server=async:servers=2"),
    ],
)
def test_it_is_added_to_the_strategy(before: str, after: str) -> None:
    assert line(before, 2) == after


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", r"no strategy of 'data' has servers; .*: parameter_server"),
        ("zero=1", "no strategy of 'zero=1' has servers"),
        ("parameter_server=async:servers=3", "these are different numbers"),
    ],
)
def test_it_is_refused_where_it_means_nothing(text: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        line(text, 2)
