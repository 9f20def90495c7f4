"""The functions of `context=N` for scripts of JAX; `unidist.jax.context` has the same names.

import unidist.jax as ud

tokens, labels = ud.context.split((tokens, labels))
"""

from unidist_context_parallel._jax.shares import attention, mean, positions, split, whole

__all__ = ["attention", "mean", "positions", "split", "whole"]
