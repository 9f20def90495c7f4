"""What is told of strategies is asked of them: options of their fields, combinations of `make_plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import pytest

from unidist.errors import ConfigurationError
from unidist.registry import Registry
from unidist.runtime.plugin_manager import PluginManager
from unidist.strategy import StrategySpec
from unidist.strategy.composition import Option, Pair, described, pairs
from unidist.strategy.interface import Plan, Strategy


@dataclass(frozen=True)
class Needy(Strategy):
    """Needs something.

    Args:
        way: how; this part is not told.
        limit: a number. More about it,
            on two lines.
        often: whether.
    """

    name: ClassVar[str] = "needy"

    way: Literal["left", "right"]
    limit: float | None = None
    often: bool = True

    def validate(self, plan: Plan) -> None:
        others = [item.name for item in plan.strategies]
        if self.way == "left" and "sized" in others:
            raise ConfigurationError("needy=left does not go together with sized; use needy=right")


@dataclass(frozen=True)
class Sized(Strategy):
    """Claims an axis."""

    name: ClassVar[str] = "sized"
    axis: ClassVar[str | None] = "sized"

    size: int

    @property
    def axis_size(self) -> int | None:
        return self.size

    def validate(self, plan: Plan) -> None:
        if plan.world_size > 4:
            raise ConfigurationError(f"sized is for few ranks, not {plan.world_size}")


class Plugins:
    """A registry with the strategies above."""

    def __init__(self) -> None:
        self.strategies: Registry[StrategySpec] = Registry("strategy")
        self.strategies.origin = "tests"
        self.strategies.add(PluginManager().load().strategies.get("data"))
        for cls in (Needy, Sized):
            self.strategies.add(StrategySpec(cls.name, f"{__name__}:{cls.__name__}", "a sample"))
        self.strategies.add(StrategySpec("broken", "unidist_nowhere:Nothing", "cannot be imported"))

    def registry(self, kind: type[Any]) -> Registry[Any]:
        return self.strategies


@pytest.fixture
def plugins() -> PluginManager:
    return cast(PluginManager, Plugins())


def test_options_come_from_fields_and_their_docstring(plugins: PluginManager) -> None:
    _, needy, sized = described(plugins)
    assert needy.options == (
        Option("", "left|right", None, "how"),
        Option("limit", "float", "", "a number"),
        Option("often", "bool", "true", "whether"),
    )
    assert needy.examples == ("needy=left", "needy=right")
    assert (needy.axis, sized.axis, sized.examples) == (None, "sized", ("sized=2",))
    assert needy.plugin == "tests"


def test_what_cannot_be_loaded_is_left_out(plugins: PluginManager) -> None:
    assert [item.name for item in described(plugins)] == ["data", "needy", "sized"]


def test_pairs_go_together_where_a_plan_can_be_made(plugins: PluginManager) -> None:
    found = {(pair.first, pair.second): pair for pair in pairs(described(plugins), plugins)}
    assert found[("data", "needy=left")] == Pair("data", "needy=left", (8, 4, 6, 2, 1))
    assert found[("needy=right", "sized=2")].worlds == (4, 2)
    refused = found[("needy=left", "sized=2")]
    assert refused.worlds == ()
    assert refused.error == "needy=left does not go together with sized; use needy=right"


def test_every_first_party_strategy_is_described() -> None:
    manager = PluginManager().load()
    for item in described(manager):
        assert item.summary, item.name
        assert item.examples, item.name
        for option in item.options:
            assert option.help, f"{item.name}: {option.name or 'the value'} is not in the section Args of its docstring"


def test_known_pairs_of_this_installation() -> None:
    manager = PluginManager().load()
    found = {(pair.first, pair.second): pair for pair in pairs(described(manager), manager)}
    assert found[("accumulate=2", "zero=1")].worlds
    assert "both own the gradient exchange" in found[("data", "zero=1")].error
