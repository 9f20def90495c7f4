"""`unidist.tensorflow`'s DistributedOptimizer: for optimizers of Keras 3, and of TF1 in graphs with sessions."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from unidist.builtin.data import DataParallel
from unidist.errors import ConfigurationError, UsageError
from unidist.gradients.compression import GradientCompressor
from unidist.horovod_api.arguments import Groups, OptimizerArguments, check_groups, check_passes
from unidist.horovod_api.reduce_ops import Op
from unidist.mixins import with_mixin
from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist.runtime import context
from unidist_tensorflow.operations.compression import Compression
from unidist_tensorflow.optimizer.arguments import CompressionLike
from unidist_tensorflow.optimizer.graph_window import GraphWindow
from unidist_tensorflow.optimizer.pairs import PairReduction
from unidist_tensorflow.training.distributed_optimizer import distribute_optimizer


def _check_plan() -> None:
    """Raise ConfigurationError if the command line asks for a strategy of which optimizers of TF1 know nothing."""
    for item in context.current().plan.strategies:
        if type(item) is not DataParallel or item.compression is not None:
            raise ConfigurationError(
                f"strategy {item.name!r}: an optimizer of TF1 exchanges gradients itself, as Horovod's does, and no "
                "strategy has a part in that. Leave --strategy out (compression=, backward_passes_per_step= and others "
                "are arguments of DistributedOptimizer), or use an optimizer of Keras 3"
            )


class DistributedTF1Mixin:
    """Methods that `DistributedOptimizer` adds to an optimizer of TF1. Never instantiated by itself."""

    _unidist: PairReduction
    _unidist_window: GraphWindow | None

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return pairs of reduced gradient and variable, as Horovod's optimizer does. Collective."""
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]  # of an optimizer
        return (self._unidist_window or self._unidist).reduce(pairs)

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Update; with several passes for an update after the last of them alone."""
        pairs = list(grads_and_vars)
        update = super().apply_gradients  # type: ignore[misc]  # of an optimizer
        if self._unidist_window is None:
            return update(pairs, global_step=global_step, name=name)
        return self._unidist_window.apply(pairs, lambda: update(pairs, global_step, name), global_step)

    def register_local_var(self, var: Any) -> None:
        """Leave a variable out: every rank updates it by its own gradient."""
        self._unidist.local.add(var.ref())


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: CompressionLike = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Op = Op.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return the optimizer, of a subclass of its class that uses gradients reduced over all ranks.

    For an optimizer of Keras 3 see `unidist.keras.DistributedOptimizer`, which has the same arguments in another order.
    One of TF1 (`tf.compat.v1.train.Optimizer`) reduces in `compute_gradients`, in graphs that a session runs and in
    `tf.function`; every rank must have gradients for the same variables.

    Args:
        optimizer: of Keras 3 or of TF1; the same object is returned.
        name: see `unidist.keras.DistributedOptimizer`, as all further arguments. TF1: has no meaning.
        use_locking: for Horovod's sake: what locks is the optimizer itself, which was made before.
        device_dense: TF1: device for compressing and decompressing.
        device_sparse: TF1: device for averaging slices.
        compression: TF1: a member of `Compression`, or a class with its interface.
        sparse_as_dense: reduce slices as dense gradients.
        backward_passes_per_step: TF1: more than 1 in graphs alone, where a session runs `local_variables_initializer`
            before the first pass.
        op: Average or Sum.
        gradient_predivide_factor: with Average, gradients are divided by it before the sum and multiplied after it.
        average_aggregated_gradients: of several passes, the mean instead of the sum.
        num_groups: deprecated; use `groups`.
        groups: TF1: all gradients are one group in any case.
        process_set: the ranks that take part.
        scale_local_gradients: divide gradients of local variables by the number of ranks.
    """
    del use_locking
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        arguments = OptimizerArguments(
            compression=compression,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            num_groups=num_groups,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
            name=name,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            scale_local_gradients=scale_local_gradients,
        )
        return distribute_optimizer(optimizer, arguments)
    _check_plan()
    if isinstance(optimizer, DistributedTF1Mixin):
        raise UsageError("this optimizer is distributed already")
    check_passes(backward_passes_per_step)
    if backward_passes_per_step > 1 and tf.executing_eagerly():
        raise UsageError(
            f"backward_passes_per_step={backward_passes_per_step} with an optimizer of TF1 works in graphs alone; in "
            "eager mode use one of keras.optimizers"
        )
    if isinstance(compression, str | GradientCompressor):
        raise UsageError(
            f"compression={compression!r} compresses buckets of gradients, but an optimizer of TF1 exchanges single "
            "tensors; use a member of Compression, or a class like Horovod's Compressor"
        )
    check_groups(groups)
    if op not in (Op.Average, Op.Sum):
        raise ValueError(f"op={Op(op).name}: gradients of TF1's optimizers are reduced by Average or Sum")
    if gradient_predivide_factor != 1.0 and op != Op.Average:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} splits an average; use op=Average")
    tf1: Any = optimizer
    plain = type(tf1)
    tf1.__class__ = with_mixin(plain, DistributedTF1Mixin)
    tf1._unidist = PairReduction(
        scale_local=scale_local_gradients,
        sparse_as_dense=sparse_as_dense,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        op=op,
        process_set=process_set,
        predivide_factor=gradient_predivide_factor,
    )
    tf1._unidist_window = None
    if not hasattr(tf1, "_optimizer"):
        tf1._optimizer = tf1  # Horovod's is around the script's optimizer, which scripts reach by this name
    if backward_passes_per_step > 1:
        tf1._unidist_window = GraphWindow(
            backward_passes_per_step,
            tf1._unidist,
            average=average_aggregated_gradients,
            sparse_as_dense=sparse_as_dense,
            name=name or f"Distributed{plain.__name__}",
        )
    return tf1
