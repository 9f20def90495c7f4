"""The strategy `tensor`: large layers are cut, and each rank of the axis `tensor` holds and computes a part of them.

Megatron-LM's division (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053). At the root are the strategy, its
interface to frameworks (`binding`), its planning and the losses that scripts import; only `losses` and `keras_losses`
import a framework. `layout` is arithmetic on dims and roles of layers; `_torch` and `_keras` cut models, and neither
knows the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist_tensor_parallel.binding import TensorBinding

if TYPE_CHECKING:
    from unidist_tensor_parallel.strategy import Tensor

__all__ = ["Tensor", "TensorBinding", "keras_losses", "losses"]


def __getattr__(name: str) -> object:
    if name == "Tensor":
        from unidist_tensor_parallel.strategy import Tensor

        return Tensor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
