"""Several passes for one update, for optimizers of TF1: sums of gradients in variables of the graph.

The results are those of Horovod 0.28.1's LocalGradientAggregationHelper: passes between two exchanges return this
rank's own gradients, and update nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from unidist_tensorflow.optimizer.pairs import PairReduction, Pairs

v1 = tf.compat.v1


class GraphWindow:
    """Sums up the gradients of a number of passes and exchanges the sums with the last one.

    Args:
        passes: at least 2.
        reduction: exchanges the sums; the same on every rank.
        average: the sums are divided by the number of passes.
        sparse_as_dense: slices are made dense; else they are an error.
        name: of the scope of its variables, which are local ones: a session runs `local_variables_initializer`.
    """

    def __init__(
        self, passes: int, reduction: PairReduction, *, average: bool, sparse_as_dense: bool, name: str
    ) -> None:
        self._passes, self._reduction, self._average = passes, reduction, average
        self._sparse_as_dense, self._name = sparse_as_dense, name
        self._counter: Any = None

    def reduce(self, pairs: Pairs) -> list[tuple[Any, Any]]:
        """Return the pairs with the exchanged sums in a last pass, else as they are. Collective in a last pass.

        Raises:
            ValueError: a gradient is slices, and those are not to be made dense.
        """
        used = [(self._dense(gradient), each) for gradient, each in pairs if gradient is not None]
        sums = self._made([gradient for gradient, _ in used])
        begins = tf.equal(self._counter, 0)
        added = [
            total.assign(tf.where(begins, gradient, total + gradient))
            for total, (gradient, _) in zip(sums, used, strict=True)
        ]
        with tf.control_dependencies(added):
            counted = self._counter.assign_add(1)
        with tf.control_dependencies([counted]):
            results = tf.cond(
                tf.equal(self._counter, self._passes),
                lambda: self._exchanged(sums, [each for _, each in used]),
                lambda: [tf.identity(gradient) for gradient, _ in used],
            )
        left = iter(results if isinstance(results, list | tuple) else [results])
        return [(None if gradient is None else next(left), each) for gradient, each in pairs]

    def apply(self, pairs: Pairs, update: Callable[[], Any], global_step: Any) -> Any:
        """Return an operation that updates after a last pass; `global_step` counts every pass."""
        gradients = [gradient for gradient, _ in pairs if gradient is not None]

        def count() -> Any:
            if global_step is None:
                return tf.no_op()
            return tf.group(global_step.assign_add(tf.ones([], global_step.dtype)))

        with tf.control_dependencies(gradients):
            return tf.cond(tf.equal(self._counter, 0), lambda: tf.group(update()), count)

    def _made(self, gradients: list[Any]) -> list[Any]:
        collections = [v1.GraphKeys.LOCAL_VARIABLES]
        with v1.variable_scope(self._name, reuse=v1.AUTO_REUSE):
            self._counter = v1.get_variable(
                "passes",
                initializer=tf.zeros([], tf.int32),
                trainable=False,
                collections=collections,
                use_resource=True,
            )
            return [
                v1.get_variable(
                    f"sum_{index}",
                    initializer=tf.zeros(gradient.shape, gradient.dtype),
                    trainable=False,
                    collections=collections,
                    use_resource=True,
                )
                for index, gradient in enumerate(gradients)
            ]

    def _exchanged(self, sums: list[Any], variables: list[Any]) -> list[Any]:
        totals = [total.read_value() for total in sums]
        reduced = [gradient for gradient, _ in self._reduction.reduce(list(zip(totals, variables, strict=True)))]
        if self._average:
            reduced = [gradient / self._passes for gradient in reduced]
        with tf.control_dependencies([*reduced, self._counter.assign(0)]):
            return [tf.identity(gradient) for gradient in reduced]

    def _dense(self, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self._sparse_as_dense:
            raise ValueError(
                "a gradient is tf.IndexedSlices, whose sums over backward_passes_per_step passes have no fixed size; "
                "use sparse_as_dense=True"
            )
        return tf.convert_to_tensor(gradient)
