"""The strategy `zero`: each rank keeps a shard of the optimizer state, and of the gradients and parameters if asked to.

At the root are the strategy, its interface to frameworks (`binding`) and functions for scripts: none of these modules
imports a framework until a function is called. `sharding` knows buckets and communicators only; `_torch` and `_keras`
bind it to a framework, and neither knows the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_zero import memory_figures
    from unidist_zero.binding import ZeroBinding
    from unidist_zero.lazy_init import deferred, init_with
    from unidist_zero.sharding import gathered
    from unidist_zero.strategy import Zero

__all__ = [
    "Zero", "ZeroBinding", "deferred", "gathered", "init_with", "memory_figures",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "": "memory_figures",
        "binding": "ZeroBinding",
        "lazy_init": "deferred init_with",
        "sharding": "gathered",
        "strategy": "Zero",
    },
)
