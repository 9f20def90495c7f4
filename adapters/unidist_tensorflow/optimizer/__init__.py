"""Keras optimizers and gradient tapes bound to an `Update`: which gradients are exchanged, and the inner step on them.

May import `framework`, `gradients`, `operations` and the modules at the root of this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_tensorflow.optimizer.elementwise import RowCheck, counts_occurrences, needs_whole_variables
    from unidist_tensorflow.optimizer.inner_step import (
        Entry,
        InnerStep,
        WholeStep,
        has_sharded_state,
        restoring,
    )
    from unidist_tensorflow.optimizer.narrow_update import update_by
    from unidist_tensorflow.optimizer.stochastic_rounding import Elements
    from unidist_tensorflow.optimizer.tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    "DistributedGradientTape", "Elements", "Entry", "InnerStep", "PartialDistributedGradientTape", "RowCheck",
    "WholeStep", "counts_occurrences", "has_sharded_state", "needs_whole_variables", "restoring", "update_by",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "elementwise": "RowCheck counts_occurrences needs_whole_variables",
        "inner_step": "Entry InnerStep WholeStep has_sharded_state restoring",
        "narrow_update": "update_by",
        "stochastic_rounding": "Elements",
        "tape": "DistributedGradientTape PartialDistributedGradientTape",
    },
)
