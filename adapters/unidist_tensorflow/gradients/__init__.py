"""The exchange of gradients as arrays, dense and sparse, and the nodes by which eager code and graphs take part in it.

May import `operations` and the modules at the root of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_arrays.fused_exchange import ExchangeResult, FusedExchange
    from unidist_arrays.slices import Slices
    from unidist_tensorflow.gradients.custom import differentiable_once, pair, pair_of_groups
    from unidist_tensorflow.gradients.samples import gather_samples
    from unidist_tensorflow.gradients.tensors import AddedOperations, ExchangeOutputs, Gradient, HostFunction, host_node

__all__ = [
    "AddedOperations", "ExchangeOutputs", "ExchangeResult", "FusedExchange", "Gradient", "HostFunction", "Slices",
    "differentiable_once", "gather_samples", "host_node", "pair", "pair_of_groups",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "custom": "differentiable_once pair pair_of_groups",
        "samples": "gather_samples",
        "tensors": (
            "AddedOperations ExchangeOutputs ExchangeResult FusedExchange Gradient HostFunction Slices host_node"
        ),
    },
)
