"""Checkpoints of trees of parameters and of optimizer states of optax.

`layout` says what each leaf of an optimizer state is, and `places` which part of which tensor. `optimizer` and `model`
are the states of a checkpoint, `states` brings them to the core, and `api` has `save`, `load` and `redistribute`.

May import `compiled`, `operations`, `framework`, `optimizer` and the modules at the root of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_jax.checkpoint.api import Loaded, load, redistribute, save
    from unidist_jax.checkpoint.model import ModelState
    from unidist_jax.checkpoint.optimizer import OptimizerState
    from unidist_jax.checkpoint.states import (
        JaxStates,
        KeptOptimizer,
        KeptParameters,
        Training,
        kept_training,
        state_of_ranks,
    )

__all__ = [
    "JaxStates", "KeptOptimizer", "KeptParameters", "Loaded", "ModelState", "OptimizerState", "Training",
    "kept_training", "load", "redistribute", "save", "state_of_ranks",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "api": "Loaded load redistribute save",
        "model": "ModelState",
        "optimizer": "OptimizerState",
        "states": "JaxStates KeptOptimizer KeptParameters Training kept_training state_of_ranks",
    },
)
