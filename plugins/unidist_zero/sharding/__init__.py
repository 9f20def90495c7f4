"""Sharded gradients and parameters without a framework: partition, reduce-scatter, all-gather, shared memory, files.

Imports only the core, and neither `_torch` nor `_keras`. Nothing here but `gathered` is public.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_zero.sharding.gathered_model import gathered

__all__ = [
    "gathered",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "gathered_model": "gathered",
    },
)
