"""The strategy `expert`: each rank of its axis holds some experts of every layer, and tokens travel to their experts.

The division of GShard (Lepikhin et al. 2020, https://arxiv.org/abs/2006.16668). At the root are the strategy, its
interface to frameworks (`binding`), its planning, and what scripts import: `torch` and `keras`, the layers. `layout` is
arithmetic on experts and parameters; `_torch` and `_keras` hold the layers and divide models, and neither knows the
other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_expert_parallel.binding import ExpertBinding
    from unidist_expert_parallel.strategy import ExpertParallel

__all__ = [
    "ExpertBinding", "ExpertParallel",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "binding": "ExpertBinding",
        "strategy": "ExpertParallel",
    },
)
