"""The functions for scripts of JAX: `synchronize`, for a `TrainStep`, and for the script's trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_local_sgd.jax.trees import synchronize

__all__ = ["synchronize"]

__getattr__ = lazy_names(__name__, {"trees": "synchronize"})
