"""The core's questions to PyTorch: tensors as buffers and back, arithmetic on them, and the size and cost of models.

May import the modules at the root of this package. torch itself is imported when a tensor is first handled, since every
process that looks for its framework loads `TorchFramework`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_torch.framework.torch_framework import TorchFramework

__all__ = ["TorchFramework"]

__getattr__ = lazy_names(
    __name__,
    {
        "torch_framework": "TorchFramework",
    },
)
