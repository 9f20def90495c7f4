"""The strategy `precision`: 16-bit arithmetic where it is accurate enough, 32 bits elsewhere.

`strategy` decides, without a framework; `_torch`, `_keras` and `_jax` prepare a model, behind the interface of
`binding`. Other strategies learn the decision from `unidist.gradients.precision`; the loss scaler is in
`unidist.optim.loss_scaling`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_precision.binding import PrecisionBinding
    from unidist_precision.strategy import MixedPrecision

__all__ = [
    "MixedPrecision", "PrecisionBinding",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "binding": "PrecisionBinding",
        "strategy": "MixedPrecision",
    },
)
