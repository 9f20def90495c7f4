"""The arguments of Horovod's DistributedOptimizer and tapes: checked as Horovod does, and translated."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras

from unidist.compression import GradientCompressor, build_compressor
from unidist.compressors.half import BFloat16, Float16
from unidist.context import Context
from unidist.exchange_options import ExchangeOptions
from unidist.mesh import DATA_AXIS
from unidist.process_sets import ProcessSet, global_process_set
from unidist.reductions import Op
from unidist.registry import CompressorSpec, Registry
from unidist_tensorflow.compression import BF16Compressor, FP16Compressor, NoneCompressor

Groups = int | Sequence[Sequence[Any]] | None
CompressionLike = Any
"""A member of `Compression`, a compressor's name with options ("powersgd/rank=2"), or a GradientCompressor."""

_OWN: dict[Any, GradientCompressor | None] = {
    NoneCompressor: None,
    FP16Compressor: Float16(),
    BF16Compressor: BFloat16(),
}


def exchange_options(
    context: Context,
    *,
    compression: CompressionLike,
    op: Op,
    gradient_predivide_factor: float,
    num_groups: int = 0,
    groups: Groups,
    position: Callable[[Any], int | None],
    sparse_as_dense: bool,
    process_set: ProcessSet,
) -> ExchangeOptions:
    """Return the options for Horovod's arguments, of which it checks those that it is given.

    Args:
        position: of a variable of `groups` among the optimizer's; None for one that is not among them.

    Raises:
        ValueError: arguments that Horovod refuses.
    """
    if op not in (Op.Average, Op.Sum):
        raise ValueError(f"op={Op(op).name}: gradients of Keras optimizers and tapes are reduced by Average or Sum")
    if gradient_predivide_factor != 1.0 and op != Op.Average:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} splits an average; use op=Average")
    if not gradient_predivide_factor > 0:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor}: give a factor above 0")
    if num_groups != 0:
        warnings.warn("num_groups is deprecated, as in Horovod; use groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if process_set.process_set_id is None:
        raise ValueError(f"{process_set!r} is not registered; pass it to init(process_sets=[...]) or add_process_set")
    is_global = process_set is global_process_set or process_set.process_set_id == 0
    if not is_global and context.axis_size(DATA_AXIS) != context.topology.world_size:
        raise ValueError(f"{process_set!r} and {context.plan.mesh}: a process set needs all ranks on the data axis")
    return ExchangeOptions(
        compressor=compressor_of(compression, context.plugins.compressors),
        predivide_factor=float(gradient_predivide_factor),
        process_set=None if is_global else process_set,
        groups=_positions(groups, position),
        sparse_as_dense=sparse_as_dense,
    )


def compressor_of(compression: CompressionLike, registry: Registry[CompressorSpec]) -> GradientCompressor | None:
    """Return the compressor; None for `Compression.none`, which leaves it to the strategy.

    Raises:
        ConfigurationError: an unknown name.
        ValueError: something that is no compressor.
    """
    if isinstance(compression, str):
        return build_compressor(compression, registry)
    if isinstance(compression, GradientCompressor):
        compression.validate()
        return compression
    if isinstance(compression, type) and compression in _OWN:
        return _OWN[compression]
    raise ValueError(
        f"compression={compression!r}: gradients are exchanged in buckets, not one by one; give a member of "
        "Compression, the name of a compressor, or a unidist.compression.GradientCompressor"
    )


def _positions(groups: Groups, position: Callable[[Any], int | None]) -> int | tuple[tuple[int, ...], ...] | None:
    if groups is None:
        return None
    if isinstance(groups, int):
        if groups <= 0:
            raise ValueError(f"groups={groups}: give a positive number of groups, or a list of lists of variables")
        return groups
    if not isinstance(groups, Sequence):
        raise ValueError(f"groups should be a positive integer or a list of lists of variables, not {type(groups)}")
    found = [[position(variable) for variable in group] for group in groups]
    listed = [place for group in found for place in group if place is not None]
    if len(set(listed)) != len(listed):
        raise ValueError("a variable can only appear once in groups")
    return tuple(tuple(place for place in group if place is not None) for group in found)


def local_variables(local_layers: Any) -> list[Any]:
    """Return the trainable variables of layers, given as one layer, several or None.

    Raises:
        ValueError: something that is no layer.
    """
    if local_layers is None:
        return []
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers)
    if not all(isinstance(layer, keras.layers.Layer) for layer in layers):
        raise ValueError("all local layers must be of the type keras.layers.Layer")
    return [variable for layer in layers for variable in layer.trainable_weights]
