"""Optimizers of optax, bound to an `Update`: their `update` exchanges the gradients first.

`exchange` has the operations by which a compiled program hands gradients over, `cell` the references from such
operations to what they use, `inner_step` the part that a strategy replaces if it shards updates, `binding` the bound
optimizer.

May import `compiled`, `operations`, `framework` and the modules at the root of this package.
"""

from unidist_jax.optimizer.binding import BoundOptimizer, bind
from unidist_jax.optimizer.cell import Cell
from unidist_jax.optimizer.exchange import GradientLeaves, copy_array
from unidist_jax.optimizer.inner_step import InnerStep

__all__ = ["BoundOptimizer", "Cell", "GradientLeaves", "InnerStep", "bind", "copy_array"]
