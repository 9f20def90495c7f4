"""What the strategy line of a pipeline may say; errors come before any process starts."""

from __future__ import annotations

import pytest

from unidist.errors import ConfigurationError
from unidist.runtime.plugin_manager import PluginManager
from unidist.strategy.interface import Plan
from unidist.strategy.plan import build, make_plan
from unidist_pipeline.strategy import Pipeline


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return PluginManager().load()


def planned(line: str, size: int, plugins: PluginManager) -> Plan:
    plan = make_plan(build(line, plugins.strategies), size, plugins.strategies)
    for item in plan.strategies:
        if isinstance(item, Pipeline):
            item.check_plugins(plugins)
    return plan


def test_the_pipeline_is_the_outermost_axis(plugins: PluginManager) -> None:
    plan = planned("pipeline=2:schedule=zb-h1:microbatches=8,zero=1", 8, plugins)
    assert list(plan.mesh.axes) == ["pipeline", "data"]
    assert plan.mesh.group("pipeline", rank=1) == (1, 5)
    assert plan.model_axes == ("pipeline",)


def test_microbatches_are_four_for_each_rank_unless_given() -> None:
    assert Pipeline(3).num_microbatches == 12
    assert Pipeline(3, microbatches=2).num_microbatches == 2


@pytest.mark.parametrize(
    ("line", "size", "told"),
    [
        ("pipeline=3", 8, r"pipeline\(3\) = 3 does not divide world_size 8"),
        ("pipeline=2:microbatches=0", 2, "microbatches=0"),
        ("pipeline=2:schedule=2f2b", 2, "2f2b.*Choices.*1f1b"),
        ("pipeline=2:schedule=1f1b:stages_per_rank=2", 2, "interleaved"),
        ("pipeline=2:balance=luck", 2, "luck.*memory, parameters, time"),
        ("pipeline=2:balance=time", 2, "example"),
        ("pipeline=2:example=x", 2, "command line"),
        ("pipeline=2:split=a+", 2, "empty name"),
        ("pipeline=2,zero=3", 4, "zero=1"),
    ],
)
def test_what_does_not_go_is_refused(line: str, size: int, told: str, plugins: PluginManager) -> None:
    with pytest.raises(ConfigurationError, match=told):
        planned(line, size, plugins)
