"""The arguments of Horovod's DistributedOptimizer and tapes: checked as Horovod does, and translated."""

from __future__ import annotations

from typing import Any

import keras

from unidist import horovod_arguments
from unidist.compression import GradientCompressor
from unidist.compressors.half import BFloat16, Float16
from unidist.context import Context
from unidist.exchange_options import ExchangeOptions
from unidist.horovod_arguments import Groups, Position, bucket_compressor
from unidist.process_sets import ProcessSet
from unidist.reductions import Op
from unidist_tensorflow.compression import BF16Compressor, FP16Compressor, NoneCompressor

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
    position: Position,
    sparse_as_dense: bool,
    process_set: ProcessSet,
) -> ExchangeOptions:
    """Return the options for Horovod's arguments, of which it checks those that it is given.

    Raises:
        ValueError: arguments that Horovod refuses.
    """
    if op not in (Op.Average, Op.Sum):
        raise ValueError(f"op={Op(op).name}: gradients of Keras optimizers and tapes are reduced by Average or Sum")
    return horovod_arguments.exchange_options(
        context,
        compressor=bucket_compressor(compression, context.plugins.compressors, members=_OWN, otherwise=_refuse),
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        position=position,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )


def _refuse(compression: Any) -> GradientCompressor:
    raise ValueError(
        f"compression={compression!r}: gradients are exchanged in buckets, not one by one; give a member of "
        "Compression, the name of a compressor, or a unidist.compression.GradientCompressor"
    )


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
