"""The strategy `context`: the tokens of each sample are divided over ranks, which all have the whole model.

At the root are the strategy, its interface to frameworks (`binding`), its planning, and what scripts use (`torch` and
`jax`, which alone import a framework). `layout` is arithmetic on positions, `attention` the ring for frameworks without
a kernel for its blocks. `_torch` and `_keras` follow divided sequences through models, and `_jax` divides what a loss
function asks for; none knows the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_context_parallel.binding import ContextBinding
    from unidist_context_parallel.strategy import ContextParallel

__all__ = ["ContextBinding", "ContextParallel"]

__getattr__ = lazy_names(__name__, {"binding": "ContextBinding", "strategy": "ContextParallel"})
