"""The exchange of gradients as arrays, dense and sparse, and the nodes by which eager code and graphs take part in it.

May import `operations` and the modules at the root of this package.
"""

from unidist_tensorflow.gradients.fused_exchange import FusedExchange, Result
from unidist_tensorflow.gradients.slices import Slices
from unidist_tensorflow.gradients.tensors import Gradient, HostFunction, Since, Taken, host_node

__all__ = ["FusedExchange", "Gradient", "HostFunction", "Result", "Since", "Slices", "Taken", "host_node"]
