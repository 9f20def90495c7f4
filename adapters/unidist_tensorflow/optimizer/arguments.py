"""The arguments of Horovod's DistributedOptimizer and tapes: checked as by Horovod, and translated."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unidist.errors import UsageError
from unidist.gradients.options import ExchangeOptions
from unidist.horovod_api.arguments import Groups, OptimizerArguments
from unidist.horovod_api.reduce_ops import Op
from unidist.runtime.context import Context
from unidist.strategy.interface import Plan, ShardsUpdates
from unidist_tensorflow.gradients.compression import compressor_of
from unidist_tensorflow.keras_api import VARIABLES, layers

CompressionLike = Any
"""A member of `Compression`, a class like it, a compressor's name ("powersgd/rank=2"), or a GradientCompressor."""


def exchange_options(context: Context, arguments: OptimizerArguments) -> ExchangeOptions:
    """Check Horovod's arguments, and return them as options.

    `groups` as lists of variables are checked and left to `with_groups`: the variables are not known yet.

    Raises:
        ValueError: arguments that Horovod refuses.
    """
    op = arguments.op
    if op not in (Op.Average, Op.Sum):
        raise ValueError(f"op={Op(op).name}: gradients of Keras optimizers and tapes are reduced by Average or Sum")
    compressor = compressor_of(arguments.compression, context.plugins.compressors)
    options = arguments.exchange_options(context, compressor=compressor, position=_checked)
    return options if isinstance(options.groups, int) else replace(options, groups=None)


def check_unsharded(plan: Plan, caller: str) -> None:
    """Raise UsageError if a strategy of the plan shards updates over the ranks, for which `caller` sees too little."""
    sharding = [item.name for item in plan.strategies if isinstance(item, ShardsUpdates)]
    if sharding:
        raise UsageError(
            f"strategy {sharding[0]!r} shards updates over the ranks, and {caller} cannot; use "
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


def _checked(member: Any) -> int | None:
    if not isinstance(member, VARIABLES):
        raise ValueError(f"groups must consist of variables, not {type(member).__name__}")
    return None


def local_variables(local_layers: Any) -> list[Any]:
    """Return the trainable variables of layers, given as one layer, several or None.

    Raises:
        ValueError: something that is no layer.
    """
    if local_layers is None:
        return []
    found = [local_layers] if isinstance(local_layers, layers()) else list(local_layers)
    if not all(isinstance(layer, layers()) for layer in found):
        raise ValueError("all local layers must be of the type keras.layers.Layer")
    return [variable for layer in found for variable in layer.trainable_weights]
