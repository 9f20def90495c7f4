"""The exchange of gradients as arrays, dense and sparse, and the nodes by which eager code and graphs take part in it.

May import `operations` and the modules at the root of this package.
"""

from unidist_arrays.fused_exchange import ExchangeResult, FusedExchange
from unidist_arrays.slices import Slices
from unidist_tensorflow.gradients.custom import differentiable_once, pair, pair_of_groups
from unidist_tensorflow.gradients.samples import gather_samples
from unidist_tensorflow.gradients.tensors import AddedOperations, ExchangeOutputs, Gradient, HostFunction, host_node

__all__ = [
    "AddedOperations", "ExchangeOutputs", "ExchangeResult", "FusedExchange", "Gradient", "HostFunction", "Slices",
    "differentiable_once", "gather_samples", "host_node", "pair", "pair_of_groups",
]  # fmt: skip
