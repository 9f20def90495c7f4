"""Optimizers of optax, bound to an `Update`: their `update` exchanges the gradients first.

`exchange` has the operations by which a compiled program hands gradients over, `inner_step` what a strategy that shards
updates replaces, `binding` the bound optimizer.

May import `compiled`, `operations`, `framework` and the modules at the root of this package.
"""

from unidist_jax.optimizer.binding import BoundOptimizer, bind
from unidist_jax.optimizer.exchange import GradientLeaves
from unidist_jax.optimizer.inner_step import InnerStep

__all__ = ["BoundOptimizer", "GradientLeaves", "InnerStep", "bind"]
