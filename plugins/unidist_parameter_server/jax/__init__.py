"""The functions for scripts of JAX: `pull` and `synchronize`, for a `TrainStep`, and for the script's trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_parameter_server.jax.trees import pull, synchronize

__all__ = ["pull", "synchronize"]

__getattr__ = lazy_names(__name__, {"trees": "pull synchronize"})
