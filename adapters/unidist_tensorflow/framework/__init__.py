"""The core's questions to TensorFlow: tensors as buffers and back, arithmetic on them, and the size and cost of models.

May import the modules at the root of this package. tensorflow itself is imported when a tensor is first handled, since
every process that looks for its framework loads `TensorFlowFramework`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_tensorflow.framework.tensorflow_framework import TensorFlowFramework

__all__ = ["TensorFlowFramework"]

__getattr__ = lazy_names(
    __name__,
    {
        "tensorflow_framework": "TensorFlowFramework",
    },
)
