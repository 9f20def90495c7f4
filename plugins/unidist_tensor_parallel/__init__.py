"""The strategy `tensor`: large layers are cut, and each rank of the axis `tensor` holds and computes a part of them.

Megatron-LM's division (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053). At the root are the strategy, its
interface to frameworks (`binding`), its planning and the losses that scripts import; only `losses` and `keras_losses`
import a framework. `layout` is arithmetic on dims and roles of layers; `_torch` and `_keras` cut models, and neither
knows the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_tensor_parallel.binding import TensorBinding
    from unidist_tensor_parallel.library_roles import TensorRolesSpec
    from unidist_tensor_parallel.strategy import TensorParallel

__all__ = [
    "TensorBinding", "TensorParallel", "TensorRolesSpec",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "binding": "TensorBinding",
        "library_roles": "TensorRolesSpec",
        "strategy": "TensorParallel",
    },
)
