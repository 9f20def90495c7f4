"""Optimizers of optax, bound to an `Update`: their `update` exchanges the gradients first.

`exchange` has the operations by which a compiled program hands gradients over, `cell` the references from such
operations to what they use, `inner_step` the part that a strategy replaces if it shards updates, `binding` the bound
optimizer, and `elementwise` tries whether an optimizer may update parts of leaves (`leaf_piece`) by themselves.

`narrow_optimizer` keeps parameters and state in bfloat16, by `stochastic_rounding`; `state_leaves` says which parameter
a part of an optimizer's state belongs to. `spmd_step` is the step within programs over all ranks.

May import `compiled`, `operations`, `spmd`, `framework` and the modules at the root of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_jax.optimizer.binding import BoundOptimizer, bind
    from unidist_jax.optimizer.cell import Cell
    from unidist_jax.optimizer.elementwise import needs_whole_leaves
    from unidist_jax.optimizer.exchange import GradientLeaves, copy_array
    from unidist_jax.optimizer.inner_step import InnerStep, TracedStep
    from unidist_jax.optimizer.leaf_piece import LeafPiece
    from unidist_jax.optimizer.narrow_optimizer import for_pieces
    from unidist_jax.optimizer.spmd_step import check_strategies
    from unidist_jax.optimizer.state_leaves import owner_of

__all__ = [
    "BoundOptimizer", "Cell", "GradientLeaves", "InnerStep", "LeafPiece", "TracedStep", "bind",
    "check_strategies", "copy_array", "for_pieces", "needs_whole_leaves", "owner_of",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "binding": "BoundOptimizer bind",
        "cell": "Cell",
        "elementwise": "needs_whole_leaves",
        "exchange": "GradientLeaves copy_array",
        "inner_step": "InnerStep TracedStep",
        "leaf_piece": "LeafPiece",
        "narrow_optimizer": "for_pieces",
        "spmd_step": "check_strategies",
        "state_leaves": "owner_of",
    },
)
