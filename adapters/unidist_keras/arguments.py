"""Arguments of Horovod's DistributedOptimizer that name variables of Keras."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unidist.errors import UsageError
from unidist.gradients.options import ExchangeOptions
from unidist.horovod_api.arguments import Groups
from unidist.optim.actors import ActsOnParameters
from unidist.optim.interface import BringsInnerStep
from unidist.strategy.interface import Plan

__all__ = ["check_unsharded", "listed_groups", "local_variables", "with_groups"]


def check_unsharded(plan: Plan, caller: str, *, has_optimizer: bool = True) -> None:
    """Raise UsageError if a strategy of the plan updates in a way for which `caller` sees too little.

    Args:
        plan: of the run.
        caller: for the message.
        has_optimizer: it binds an optimizer, and only sharded updates are too much; else it only exchanges gradients.
    """
    sharding = plan.shards_updates
    for item in plan.strategies:
        shards = sharding is not None and item.name == sharding.name
        steps_alone = item.name == plan.owner.name and plan.steps_alone
        if shards or (not has_optimizer and (steps_alone or isinstance(item, BringsInnerStep | ActsOnParameters))):
            what = "shards updates over the ranks" if shards else "brings its own updates"
            raise UsageError(
                f"strategy {item.name!r} {what}, and {caller} cannot; use "
                "model, optimizer = distribute(model, optimizer)"
            )


def listed_groups(groups: Groups) -> Sequence[Sequence[Any]] | None:
    """Return groups that are lists of variables; None for any others."""
    return None if groups is None or isinstance(groups, int) else groups


def with_groups(
    options: ExchangeOptions,
    groups: Sequence[Sequence[Any]] | None,
    key: Callable[[Any], Hashable],
    places: Mapping[Any, int],
) -> ExchangeOptions:
    """Return the options with groups of variables as groups of places; unchanged without groups.

    Args:
        options: what else is asked for.
        groups: lists of variables, or None.
        key: of a variable.
        places: of the variables that are exchanged, by key; others are left out, as in Horovod.
    """
    if groups is None:
        return options
    found = [[places.get(key(variable)) for variable in group] for group in groups]
    return replace(options, groups=tuple(tuple(place for place in group if place is not None) for group in found))


def local_variables(local_layers: Any, layers: tuple[type[Any], ...]) -> list[Any]:
    """Return the trainable variables of layers, given as one layer, several or None.

    Args:
        local_layers: what the script gives.
        layers: the classes of layers.

    Raises:
        ValueError: something that is no layer.
    """
    if local_layers is None:
        return []
    found = [local_layers] if isinstance(local_layers, layers) else list(local_layers)
    if not all(isinstance(layer, layers) for layer in found):
        raise ValueError("all local layers must be of the type keras.layers.Layer")
    return [variable for layer in found for variable in layer.trainable_weights]
