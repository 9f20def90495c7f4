"""The core's questions to JAX: arrays as buffers and back, and the leaves of trees as parameters.

May import the modules at the root of this package. jax itself is imported when an array is first handled, since every
process that looks for its framework loads `JaxFramework`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_jax.framework.jax_framework import JaxFramework, by_path

__all__ = ["JaxFramework", "by_path"]

__getattr__ = lazy_names(
    __name__,
    {
        "jax_framework": "JaxFramework by_path",
    },
)
