"""From the strategy line to a checked plan."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from unidist.builtin.identity import Identity
from unidist.errors import ConfigurationError
from unidist.options import LineItem, parse
from unidist.registry import Registry
from unidist.strategy import StrategySpec
from unidist.strategy.interface import GradientOwner, Plan, Strategy, UpdateGate
from unidist.strategy.plan import build, make_plan


@dataclass(frozen=True)
class Shards(Strategy, GradientOwner):
    """Owns the gradient exchange, claims the data axis."""

    size: int | None = None
    name: ClassVar[str] = "shards"
    axis: ClassVar[str | None] = "data"
    axis_order: ClassVar[int] = 50

    @property
    def axis_size(self) -> int | None:
        return self.size

    def make_exchange(self, parameters: Any, context: Any, framework: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Stages(Strategy):
    """Claims an outer axis, and has options of every type."""

    count: int
    schedule: Literal["gpipe", "1f1b"] = "gpipe"
    microbatches: int = 4
    fraction: float = 0.5
    overlap: bool = False
    label: str | None = None
    name: ClassVar[str] = "stages"
    axis: ClassVar[str | None] = "pipeline"
    axis_order: ClassVar[int] = 0

    @property
    def axis_size(self) -> int | None:
        return self.count

    def validate(self, plan: Plan) -> None:
        if self.microbatches < self.count:
            raise ConfigurationError(f"stages: microbatches({self.microbatches}) < stages({self.count})")


@dataclass(frozen=True)
class Gate(Strategy, UpdateGate):
    """Decides when an update happens."""

    steps: int
    name: ClassVar[str] = "gate"
    passes_per_update: ClassVar[int] = 1
    averages_passes: ClassVar[bool] = True


@dataclass(frozen=True)
class OtherGate(Gate):
    """A second one."""

    name: ClassVar[str] = "othergate"


@dataclass(frozen=True)
class OtherShards(Shards):
    """Would own the exchange too."""

    name: ClassVar[str] = "othershards"


@pytest.fixture
def registry() -> Registry[StrategySpec]:
    made: Registry[StrategySpec] = Registry("strategy")
    for cls in (Shards, Stages, Gate, OtherGate, OtherShards):
        made.add(StrategySpec(cls.name, f"{__name__}:{cls.__name__}", ""))
    made.add(StrategySpec("identity", "unidist.builtin.identity:Identity", ""))
    made.add(StrategySpec("data", f"{__name__}:Shards", "stands in for the default"))
    return made


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the registry import this very module, whatever name the test runner gave it."""
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or __import__(__name__))


def test_a_line_is_cut_into_names_values_and_options() -> None:
    assert parse("") == parse(" , ") == []
    assert parse("zero=2, accumulate=4,identity") == [
        LineItem("zero", "2"),
        LineItem("accumulate", "4"),
        LineItem("identity"),
    ]
    assert parse("pipeline=2:schedule=1f1b:micro-batches= 8") == [
        LineItem("pipeline", "2", {"schedule": "1f1b", "micro_batches": "8"})
    ]


@pytest.mark.parametrize("line", ["=2", "zero=", "zero=2:", "zero=2:stage", "zero=2:=1", "zero=2:stage=", ":a=b"])
def test_what_cannot_be_read_shows_the_item_and_the_syntax(line: str) -> None:
    with pytest.raises(ConfigurationError, match="Syntax: NAME=VALUE:OPTION=VALUE") as caught:
        parse(f"identity,{line}")
    assert "identity" not in str(caught.value)


@dataclass
class Counting(Strategy):
    """Has state, of a type that is imported for type checkers alone."""

    name: ClassVar[str] = "counting"

    every: int
    seen: NotImported = field(default=(), init=False)  # type: ignore[name-defined, assignment]  # noqa: F821


def test_the_state_of_a_strategy_is_no_option() -> None:
    registry = Registry[StrategySpec]("strategy")
    registry.add(StrategySpec("counting", f"{__name__}:Counting", "counts"))
    assert build("counting=3", registry) == (Counting(3),)
    with pytest.raises(ConfigurationError, match="unknown option"):
        build("counting=3:seen=4", registry)


def test_lines_objects_and_lists_build_the_same(registry: Registry[StrategySpec]) -> None:
    line = "stages=2:schedule=1f1b:microbatches=8:fraction=0.25:overlap=yes:label=x,identity"
    built = build(line, registry)
    assert built == (Stages(2, "1f1b", 8, 0.25, True, "x"), Identity())
    assert build([built[0], "identity"], registry) == built
    assert build(built[0], registry) == built[:1]
    assert build(None, registry) == build("", registry) == build([], registry) == ()
    assert build("shards=3", registry) == (Shards(3),)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("stags=2", "unknown strategy 'stags'. Did you mean 'stages'"),
        ("stages=two", "stages='two' is not an integer"),
        ("stages=2.0", "stages='2.0' is not an integer"),
        ("stages", r"strategy 'stages' needs a value: stages=VALUE \(count\)"),
        ("stages=2:schedul=1f1b", "unknown option of strategy 'stages': 'schedul'. Did you mean 'schedule'"),
        ("stages=2:count=2", "unknown option of strategy 'stages': 'count'"),
        ("stages=2:schedule=1f1", "unknown value for stages:schedule: '1f1'. Did you mean '1f1b'"),
        ("stages=2:fraction=half", "stages:fraction='half' is not a number"),
        ("stages=2:overlap=maybe", "stages:overlap='maybe' is not true or false"),
        ("identity=1", "strategy 'identity' takes no value, but was given '1'"),
        ("identity,identity", "strategy 'identity' is given 2 times"),
    ],
)
def test_wrong_names_and_values_are_told_apart(registry: Registry[StrategySpec], line: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build(line, registry)


def test_something_else_than_a_strategy_is_refused(registry: Registry[StrategySpec]) -> None:
    with pytest.raises(ConfigurationError, match="not int"):
        build([3], registry)  # type: ignore[list-item]


def test_a_plan_has_an_owner_of_the_gradients_and_the_axes_in_order(registry: Registry[StrategySpec]) -> None:
    plan = make_plan(build("stages=2", registry), 8, registry)
    assert [type(item) for item in plan.strategies] == [Stages, Shards]
    assert list(plan.mesh.axes.items()) == [("pipeline", 2), ("data", 4)]
    assert plan.world_size == 8
    plan = make_plan(build("shards=2,stages=2", registry), 4, registry)
    assert [type(item) for item in plan.strategies] == [Shards, Stages]
    assert list(plan.mesh.axes) == ["pipeline", "data"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("shards,othershards", "strategies 'shards' and 'othershards' both own the gradient exchange"),
        ("gate=1,othergate=2", "strategies 'gate' and 'othergate' both decide when an update happens"),
        ("stages=3", r"pipeline\(3\) = 3 does not divide world_size 8"),
        ("shards=3", r"data\(3\) = 3 is not world_size 8"),
        ("stages=2:microbatches=1", r"microbatches\(1\) < stages\(2\)"),
    ],
)
def test_what_does_not_go_together_is_told_before_launch(
    registry: Registry[StrategySpec], line: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_plan(build(line, registry), 8, registry)


def test_two_strategies_cannot_claim_one_axis(registry: Registry[StrategySpec]) -> None:
    @dataclass(frozen=True)
    class MoreStages(Stages):
        name: ClassVar[str] = "morestages"

    with pytest.raises(ConfigurationError, match="'stages' and 'morestages' both claim mesh axis 'pipeline'"):
        make_plan([Stages(2), MoreStages(2)], 4, registry)


@dataclass(frozen=True)
class Numbers(Strategy):
    """Has a number of every kind."""

    first: int
    rate: float = 1.0
    size: float | None = None
    order: float = field(default=2.0, metadata={"infinite": True})
    place: int = field(default=0, metadata={"negative": True})
    name: ClassVar[str] = "numbers"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("numbers=-1", "numbers=-1 is negative; give a positive number"),
        ("numbers=nan", "numbers='nan' is not an integer"),
        ("numbers=1.5", "numbers='1.5' is not an integer"),
        ("numbers=true", "numbers='true' is not an integer"),
        ("numbers=1:rate=nan", "numbers:rate='nan' is not a number"),
        ("numbers=1:size=nan", "numbers:size='nan' is not a number"),
        ("numbers=1:size=inf", "numbers:size='inf' is not finite"),
        ("numbers=1:size=-inf", "numbers:size='-inf' is not finite"),
        ("numbers=1:size=-2", "numbers:size=-2.0 is negative"),
        ("numbers=1:order=nan", "numbers:order='nan' is not a number"),
        ("numbers=1:order=-inf", "numbers:order=-inf is negative"),
        ("numbers=1:place=two", "numbers:place='two' is not an integer"),
    ],
)
def test_numbers_of_a_line_are_checked(registry: Registry[StrategySpec], line: str, message: str) -> None:
    registry.add(StrategySpec("numbers", f"{__name__}:Numbers", ""))
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make_plan(build(line, registry), 1, registry)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"first": True}, "numbers=True is not an integer"),
        ({"first": 1.0}, "numbers=1.0 is not an integer"),
        ({"first": -1}, "numbers=-1 is negative"),
        ({"first": 1, "rate": math.nan}, "numbers:rate=nan is not a number"),
        ({"first": 1, "rate": False}, "numbers:rate=False is not a number"),
        ({"first": 1, "rate": None}, "numbers:rate=None is not a number"),
        ({"first": 1, "size": math.inf}, "numbers:size=inf is not finite"),
    ],
)
def test_numbers_of_an_object_are_checked(
    registry: Registry[StrategySpec], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make_plan(build(Numbers(**options), registry), 1, registry)


def test_a_strategy_says_itself_what_is_wrong_with_a_negative_number(registry: Registry[StrategySpec]) -> None:
    with pytest.raises(ConfigurationError, match=r"stages: microbatches\(-1\) < stages\(1\)"):
        make_plan(build("stages=1:microbatches=-1", registry), 1, registry)


def test_numbers_may_be_what_the_field_says(registry: Registry[StrategySpec]) -> None:
    registry.add(StrategySpec("numbers", f"{__name__}:Numbers", ""))
    assert build("numbers=0:order=inf:place=-1", registry) == (Numbers(0, order=math.inf, place=-1),)
    given = Numbers(np.int64(3), rate=np.float32(0.5), size=None)  # type: ignore[arg-type]
    assert build(given, registry) == (given,)
