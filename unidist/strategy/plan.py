"""From the strategy line to a checked plan: text -> `parse` -> `build` -> strategy objects -> `make_plan`.

All of it runs in the launcher as well as on the ranks, and imports no framework.
"""

from __future__ import annotations

from collections.abc import Sequence

from unidist.control.elastic.member import is_alone
from unidist.errors import ConfigurationError
from unidist.mesh import DATA_AXIS, Divides, Mesh
from unidist.options import check_numbers, construct, parse
from unidist.registry import Registry
from unidist.strategy import StrategySpec
from unidist.strategy.interface import ChoosesPrecision, GradientOwner, Plan, RunsSteps, Strategy, UpdateGate

StrategyLike = str | Strategy | Sequence["str | Strategy"] | None
"""What users may pass as `strategy=`: a line, one object, or a list of both; None takes the command line's."""


def build(strategy: StrategyLike, registry: Registry[StrategySpec]) -> tuple[Strategy, ...]:
    """Return strategy objects for what the user passed; unknown names list the choices.

    Raises:
        ConfigurationError: an unknown strategy or option, a value of the wrong type, a number out of range, one
            strategy twice.
    """
    parts: Sequence[str | Strategy]
    parts = [] if strategy is None else [strategy] if isinstance(strategy, str | Strategy) else list(strategy)
    built: list[Strategy] = []
    for part in parts:
        if isinstance(part, Strategy):
            check_numbers(part, signs=False)
            built.append(part)
        elif isinstance(part, str):
            built += [construct(request, registry.get(request.name).load()) for request in parse(part)]
        else:
            raise ConfigurationError(f"a strategy is a line of text or a Strategy object, not {type(part).__name__}")
    names = [item.name for item in built]
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"strategy {name!r} is given {names.count(name)} times; give it once")
    return tuple(built)


def make_plan(strategies: Sequence[Strategy], world_size: int, registry: Registry[StrategySpec]) -> Plan:
    """Add the defaults, lay out the mesh, and let every strategy check the whole.

    In a process of an elastic job that is in no generation yet, and so alone, axes that divide the model have one rank.

    Raises:
        ConfigurationError: sizes that do not fit the world, or strategies that do not go together.
    """
    chosen = list(strategies)
    if not any(isinstance(item, GradientOwner) for item in chosen):
        chosen.append(registry.get("data").load()())
    for capability, does in (
        (GradientOwner, "own the gradient exchange"),
        (UpdateGate, "decide when an update happens"),
        (ChoosesPrecision, "choose the precision"),
        (RunsSteps, "run the passes of a step"),
    ):
        having = [item.name for item in chosen if isinstance(item, capability)]
        if len(having) > 1:
            raise ConfigurationError(f"strategies {' and '.join(map(repr, having))} both {does}; give one of them.")
    plan = Plan(tuple(chosen), _mesh(chosen, world_size))
    for item in chosen:
        item.validate(plan)
        check_numbers(item)
    return plan


def _mesh(strategies: Sequence[Strategy], world_size: int) -> Mesh:
    axes: dict[str, int | None] = {}
    divides: dict[str, tuple[Divides, ...]] = {}
    owners: dict[str, str] = {}
    for item in sorted(strategies, key=lambda strategy: strategy.axis_order):
        if item.axis is None:
            continue
        if item.axis in owners:
            raise ConfigurationError(
                f"strategies {owners[item.axis]!r} and {item.name!r} both claim mesh axis {item.axis!r}; "
                "give one of them."
            )
        owners[item.axis] = item.name
        axes[item.axis] = item.axis_size
        divides[item.axis] = item.axis_divides
    if DATA_AXIS not in axes:
        axes[DATA_AXIS] = None
    if is_alone():
        axes = {name: None if name == DATA_AXIS else 1 for name in axes}
    return Mesh(axes, world_size=world_size, divides=divides)
