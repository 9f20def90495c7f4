"""What scripts of JAX use of `context=N`; `unidist.jax.context` has the same names.

import unidist.jax as ud

tokens, labels = ud.context.split((tokens, labels))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_context_parallel.jax.shares import attention, mean, positions, split, whole

__all__ = ["attention", "mean", "positions", "split", "whole"]

__getattr__ = lazy_names(__name__, {"shares": "attention mean positions split whole"})
