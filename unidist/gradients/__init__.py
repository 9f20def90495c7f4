"""The exchange of gradients: buckets, the contract of an exchange and its all-reduce, options, precision, compression.

Framework-free: gradients are memory (`Buffer`). Imports `negotiation`, `engines` and the root.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.gradients.allreduce import PATIENCE_SEC, AllReduceExchange
    from unidist.gradients.buckets import ALIGNMENT_BYTES, BucketLayout, ParameterInfo, Slot, plan_buckets
    from unidist.gradients.compression import (
        Bucket,
        BucketCompressor,
        CompressorSpec,
        GradientCompressor,
        build_compressor,
    )
    from unidist.gradients.interface import (
        NO_NOTICE,
        NOTICE_BYTES,
        GradientExchange,
        ReducedGradients,
        RoundResult,
    )
    from unidist.gradients.local import LocalExchange
    from unidist.gradients.options import ExchangeOptions
    from unidist.gradients.per_tensor import PerTensor, TensorAccess
    from unidist.gradients.pieces import GradientPiece
    from unidist.gradients.precision import LossScaling, Precision, Rounding, is_narrow
    from unidist.gradients.series import ExchangeSeries

__all__ = [
    "ALIGNMENT_BYTES", "AllReduceExchange", "Bucket", "BucketCompressor", "BucketLayout", "CompressorSpec",
    "ExchangeOptions", "ExchangeSeries", "GradientCompressor", "GradientExchange", "GradientPiece", "LocalExchange",
    "LossScaling", "NOTICE_BYTES", "NO_NOTICE", "PATIENCE_SEC", "ParameterInfo", "PerTensor", "Precision",
    "ReducedGradients", "RoundResult", "Rounding", "Slot", "TensorAccess", "build_compressor", "is_narrow",
    "plan_buckets",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "allreduce": "AllReduceExchange PATIENCE_SEC",
        "buckets": "ALIGNMENT_BYTES BucketLayout ParameterInfo Slot plan_buckets",
        "compression": "Bucket BucketCompressor CompressorSpec GradientCompressor build_compressor",
        "interface": "GradientExchange NOTICE_BYTES NO_NOTICE ReducedGradients RoundResult",
        "local": "LocalExchange",
        "options": "ExchangeOptions",
        "per_tensor": "PerTensor TensorAccess",
        "pieces": "GradientPiece",
        "precision": "LossScaling Precision Rounding is_narrow",
        "series": "ExchangeSeries",
    },
)
