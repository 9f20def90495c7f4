"""Gradient tapes whose gradients are reduced over all ranks, by Horovod's names; for tf.Variables and Keras'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from unidist.errors import UsageError
from unidist.gradients.buckets import ParameterInfo
from unidist.gradients.options import ExchangeOptions
from unidist.horovod_api.arguments import Groups, OptimizerArguments
from unidist.horovod_api.reduce_ops import Op
from unidist.mixins import with_mixin
from unidist.negotiation.process_sets import ProcessSet, global_process_set
from unidist.optim.accumulation import Accumulation
from unidist.runtime import context
from unidist.training.binding import check_leaves_model, planned_update
from unidist_arrays.fused_exchange import FusedExchange
from unidist_keras.arguments import check_unsharded, listed_groups, local_variables, with_groups
from unidist_tensorflow.framework import TensorFlowFramework
from unidist_tensorflow.gradients.tensors import (
    Gradient,
    exchange_eagerly,
    exchange_in_graph,
    gradients_of,
    tensor_of,
    whole_gradients,
)
from unidist_tensorflow.keras_api import layers
from unidist_tensorflow.memory import dtype_of
from unidist_tensorflow.operations.compression import Compression
from unidist_tensorflow.operations.graph import unconverted
from unidist_tensorflow.optimizer.arguments import CompressionLike, exchange_options
from unidist_tensorflow.optimizer.inner_step import as_gradient
from unidist_tensorflow.optimizer.preconditions import check_can_distribute

_Key = tuple[Any, ...]
_exchanges: WeakKeyDictionary[context.Context, dict[_Key, FusedExchange]] = WeakKeyDictionary()


class DistributedTapeMixin:
    """Methods that `DistributedGradientTape` adds to a tape. Never instantiated by itself."""

    _reducer: _Reducer

    def register_local_source(self, source: Any) -> None:
        """Leave a variable out of the exchange: its gradient stays this rank's own."""
        self._reducer.local.add(id(source))

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False, **options: Any
    ) -> Any:
        """Return the gradients, reduced over the ranks in one exchange. Collective.

        Ranks may differ in which sources have a gradient. Where this rank has none: in eager mode it gets that of the
        others, or None if there is none; in a `tf.function`, where it must be known before, zeros if there is none.

        Args:
            target: as for any tape.
            sources: as for any tape; every rank gives the same shapes and dtypes.
            output_gradients: as for any tape.
            use_generic_names: for Horovod's sake: what is exchanged goes by position, not by name.
            options: further arguments of the tape, `unconnected_gradients` say.
        """
        del use_generic_names
        local = super().gradient(target, sources, output_gradients, **options)  # type: ignore[misc]  # of a tape
        flat = self._reducer.reduce(tf.nest.flatten(local), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, flat)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return pairs of source and gradient: of the local sources, and of the others."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(sources, gradients, strict=True))
        local = self._reducer.local
        return [pair for pair in pairs if id(pair[0]) in local], [pair for pair in pairs if id(pair[0]) not in local]


class _Reducer:
    """The exchanges of a tape."""

    def __init__(
        self, options: ExchangeOptions, groups: Sequence[Sequence[Any]] | None, *, average: bool, scale_local: bool
    ) -> None:
        self.local: set[int] = set()
        self._options = options
        self._groups = groups
        self._average = average
        self._scale_local = scale_local

    @unconverted
    def reduce(self, gradients: list[Any], sources: list[Any]) -> list[Any]:
        """Return the reduced gradients."""
        runtime = context.current()
        size = self._options.num_ranks(runtime)
        exchanges = size > 1 or runtime.membership is not None or bool(runtime.plan.gradient_rules)
        if not exchanges:
            return gradients
        exchanged = [index for index, source in enumerate(sources) if id(source) not in self.local]
        exchange = self._exchange(runtime, [sources[index] for index in exchanged])
        own: dict[int, Gradient] = {}
        for place, index in enumerate(exchanged):
            if gradients[index] is not None:
                own[place] = as_gradient(gradients[index], sources[index])
        if tf.executing_eagerly():
            result = exchange_eagerly(exchange, own)
            exchange.update.applied()
            reduced: list[Any] = [
                tensor_of(exchange, result, place, sparse=isinstance(own.get(place), tf.IndexedSlices))
                for place in range(len(exchanged))
            ]
        else:
            wanted = range(len(exchanged))
            sparse = {place for place, gradient in own.items() if isinstance(gradient, tf.IndexedSlices)}
            taken = whole_gradients(exchange.variables, wanted, sparse)
            reduced = gradients_of(exchange_in_graph(exchange, own, taken)[1], exchange.variables, wanted, sparse)
        results = [self._scaled(gradient, size) for gradient in gradients]
        for index, gradient in zip(exchanged, reduced, strict=True):
            results[index] = gradient
        return results

    def _scaled(self, gradient: Any, size: int) -> Any:
        if gradient is None or not self._scale_local:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
        return gradient / size

    def _exchange(self, runtime: context.Context, sources: list[Any]) -> FusedExchange:
        """Return the exchange for sources of these shapes: tapes are made for every step, exchanges once."""
        infos = tuple(
            ParameterInfo(f"source {index}", tuple(source.shape), dtype_of(source))
            for index, source in enumerate(sources)
        )
        options = with_groups(self._options, self._groups, id, {id(each): at for at, each in enumerate(sources)})
        made = _exchanges.setdefault(runtime, {})
        key = (infos, options, self._average)
        if key not in made:
            update = planned_update(
                runtime,
                runtime.plan,
                TensorFlowFramework(),
                accumulation=Accumulation(),
                average=self._average,
                options=options,
            )
            gathers = not options.sparse_as_dense
            made[key] = FusedExchange(update, infos, keeps_results=True, gathers=gathers)
        return made[key]


def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: CompressionLike = Compression.none,
    sparse_as_dense: bool = False,
    op: Op = Op.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return the tape, of a subclass of its class whose `gradient` is reduced over all ranks.

    Args:
        gradtape: any tape; what it has recorded stays in it.
        device_dense: for Horovod's sake: gradients are exchanged from host memory, wherever they are.
        device_sparse: the same.
        compression: see `DistributedOptimizer`.
        sparse_as_dense: see `DistributedOptimizer`.
        op: Average or Sum.
        gradient_predivide_factor: see `DistributedOptimizer`.
        num_groups: deprecated; use `groups`.
        groups: see `DistributedOptimizer`.
        process_set: the ranks that take part.
        scale_local_gradients: divide gradients of local sources (`register_local_source`) by the number of ranks.
    """
    del device_dense, device_sparse
    runtime = context.current()
    check_can_distribute()
    if runtime.plan.gate is not None:
        raise UsageError(
            f"--strategy {runtime.settings.strategy} accumulates gradients, which a tape cannot do; use "
            "distribute(model, optimizer) or DistributedOptimizer"
        )
    check_leaves_model(runtime.plan, "a tape")
    check_unsharded(runtime.plan, "a tape", has_optimizer=False)
    if isinstance(gradtape, DistributedTapeMixin):
        raise UsageError("this tape is distributed already")
    arguments = OptimizerArguments(
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    options = exchange_options(runtime, arguments)
    tape: Any = gradtape
    plain = type(tape)
    tape.__class__ = with_mixin(plain, DistributedTapeMixin)
    tape._reducer = _Reducer(
        options, listed_groups(groups), average=op is not Op.Sum, scale_local=scale_local_gradients
    )
    return tape


def PartialDistributedGradientTape(  # noqa: D417, N802 - Horovod's name and arguments
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: CompressionLike = Compression.none,
    sparse_as_dense: bool = False,
    op: Op = Op.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a DistributedGradientTape that leaves the gradients of some layers alone.

    Args:
        gradtape: see `DistributedGradientTape`, as all further arguments.
        local_layers: one layer or several, built.
    """
    variables = local_variables(local_layers, layers())
    tape = DistributedGradientTape(
        gradtape,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in variables:
        tape.register_local_source(variable)
    return tape
