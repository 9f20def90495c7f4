"""The arguments of Horovod's DistributedOptimizer and tapes: checked as by Horovod, and translated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unidist.gradients.options import ExchangeOptions
from unidist.horovod_api.arguments import OptimizerArguments
from unidist.horovod_api.reduce_ops import Op
from unidist.runtime.context import Context
from unidist_tensorflow.gradients.compression import compressor_of
from unidist_tensorflow.keras_api import VARIABLES

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


def _checked(member: Any) -> int | None:
    if not isinstance(member, VARIABLES):
        raise ValueError(f"groups must consist of variables, not {type(member).__name__}")
    return None
