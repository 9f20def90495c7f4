"""Reduction of pairs of gradient and variable at once, by named operations: where no update is bound to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from unidist.horovod_api.scope import scope_of
from unidist_tensorflow.operations.reductions import grouped_allreduce

Pairs = Sequence[tuple[Any, Any]]


class PairReduction:
    """Reduces the gradients of pairs, in eager mode and in graphs.

    Args:
        scale_local: gradients of local variables are divided by the number of ranks.
        sparse_as_dense: slices are reduced as dense gradients.
        predivide_factor: gradients are divided by it before the sum, and multiplied by it afterwards.
        options: those of `grouped_allreduce`, `process_set` among them.

    Attributes:
        local: references to the variables whose gradients stay each rank's own.
    """

    def __init__(self, *, scale_local: bool, sparse_as_dense: bool, predivide_factor: float, **options: Any) -> None:
        self.local: set[Any] = set()
        self._scale_local = scale_local
        self._sparse_as_dense = sparse_as_dense
        if predivide_factor != 1.0:
            options |= {"prescale_factor": 1 / predivide_factor, "postscale_factor": predivide_factor}
        self._options = options

    def reduce(self, pairs: Pairs) -> list[tuple[Any, Any]]:
        """Return the pairs with reduced gradients. Collective: every rank has gradients for the same variables.

        A rank outside of the process set gets its own gradients back.
        """
        if not self._options["process_set"].included():
            return list(pairs)
        size = scope_of(self._options["process_set"]).size
        results = list(pairs)
        exchanged = [
            index
            for index, (gradient, each) in enumerate(pairs)
            if gradient is not None and each.ref() not in self.local
        ]
        gradients = [pairs[index][0] for index in exchanged]
        if self._sparse_as_dense:
            gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        if exchanged and size > 1:
            reduced = grouped_allreduce(gradients, name="DistributedOptimizer_Allreduce", **self._options)
            for index, gradient in zip(exchanged, reduced, strict=True):
                results[index] = (gradient, pairs[index][1])
        for index, (gradient, each) in enumerate(pairs):
            if self._scale_local and gradient is not None and each.ref() in self.local:
                results[index] = (gradient / size, each)
        return results
