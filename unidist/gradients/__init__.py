"""The exchange of gradients: buckets, the contract of an exchange and its all-reduce, options, precision, compression.

Framework-free: gradients are memory (`Buffer`). Imports `negotiation`, `engines` and the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist._lazy import lazy_names

if TYPE_CHECKING:
    from unidist.gradients.allreduce import MAX_EARLY_OPERATIONS, AllReduceExchange
    from unidist.gradients.buckets import ALIGNMENT_BYTES, BucketLayout, ParameterInfo, Slot, plan_buckets
    from unidist.gradients.compression import (
        Bucket,
        BucketCompressor,
        CompressorSpec,
        GradientCompressor,
        build_compressor,
    )
    from unidist.gradients.interface import GradientExchange, ReducedGradients, RoundResult
    from unidist.gradients.options import ExchangeOptions
    from unidist.gradients.per_tensor import PerTensor, TensorAccess
    from unidist.gradients.precision import LossScaling, Precision, is_narrow
    from unidist.gradients.series import ExchangeSeries

__all__ = [
    "ALIGNMENT_BYTES",
    "AllReduceExchange",
    "Bucket",
    "BucketCompressor",
    "BucketLayout",
    "CompressorSpec",
    "ExchangeOptions",
    "ExchangeSeries",
    "GradientCompressor",
    "GradientExchange",
    "LossScaling",
    "MAX_EARLY_OPERATIONS",
    "ParameterInfo",
    "PerTensor",
    "Precision",
    "ReducedGradients",
    "RoundResult",
    "Slot",
    "TensorAccess",
    "build_compressor",
    "is_narrow",
    "plan_buckets",
]

__getattr__ = lazy_names(
    __name__,
    {
        "ALIGNMENT_BYTES": "buckets",
        "AllReduceExchange": "allreduce",
        "Bucket": "compression",
        "BucketCompressor": "compression",
        "BucketLayout": "buckets",
        "CompressorSpec": "compression",
        "ExchangeOptions": "options",
        "ExchangeSeries": "series",
        "GradientCompressor": "compression",
        "GradientExchange": "interface",
        "LossScaling": "precision",
        "MAX_EARLY_OPERATIONS": "allreduce",
        "ParameterInfo": "buckets",
        "PerTensor": "per_tensor",
        "Precision": "precision",
        "ReducedGradients": "interface",
        "RoundResult": "interface",
        "Slot": "buckets",
        "TensorAccess": "per_tensor",
        "build_compressor": "compression",
        "is_narrow": "precision",
        "plan_buckets": "buckets",
    },
)
