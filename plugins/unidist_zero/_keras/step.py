"""ZeRO for optimizers of Keras 3, stages 1 and 2: the optimizer is built for this rank's shard of the variables.

It stays the script's own object, so learning rates, schedules, `iterations`, moving averages and loss scales are
unchanged; only the variables that it knows are shards. A step takes the gradients of the shards out of the exchange,
lets the optimizer's own class update the shards, and gathers them into the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from unidist.buffer import HOST, Buffer, DType
from unidist.checkpoint.format.interface import KeepsState
from unidist.communicator import Communicator, ReduceOp
from unidist.errors import ConfigurationError, UsageError
from unidist.jobs import SpillFolder
from unidist.optim.interface import MakesInnerStep
from unidist.optim.update import Update
from unidist_arrays.fused_exchange import ExchangeResult, FusedExchange
from unidist_keras.slots import variable_and_slots
from unidist_tensorflow.gradients.tensors import AddedOperations, ExchangeOutputs, Gradient, HostFunction
from unidist_tensorflow.memory import Array, array_of_buffer, dtype_of, empty_array
from unidist_tensorflow.optimizer.elementwise import RowCheck, needs_whole_variables
from unidist_tensorflow.optimizer.inner_step import Entry, InnerStep, restoring
from unidist_tensorflow.optimizer.narrow_update import update_by
from unidist_zero._keras.clipping import ShardedClipping, exchanged
from unidist_zero._keras.gather import VariableGather
from unidist_zero._keras.offload import StateInFiles
from unidist_zero._keras.optimizer_rebuild import SavedState, restore_state, save_state
from unidist_zero._keras.shards import VariableShard, make_shards
from unidist_zero.binding import ZeroBinding
from unidist_zero.sharding.reduce_scatter import ReduceScatterExchange
from unidist_zero.strategy import Zero


class KerasZero(ZeroBinding):
    """See `ZeroBinding`."""

    unsupported = ("shared", "units", "prefetch")

    @override
    def inner_step(self, strategy: Zero) -> MakesInnerStep:
        if strategy.offload == "host":
            raise ConfigurationError(
                "zero:offload=host does not work with tensorflow; leave it out, or give a folder "
                "(one of this name: ./host)"
            )
        files = None
        if strategy.offload is not None:
            files = SpillFolder(strategy.offload, option="zero:offload", contents="optimizer state")

        def make(optimizer: Any, plain: type[Any], update: Update) -> InnerStep:
            _check_rounding(strategy, update)
            step = _kind_of_step(strategy, update)(optimizer, plain, update)
            step.whole = strategy.whole
            step.files = files
            if strategy.sparse is None:
                step.check_rows = RowCheck(optimizer, plain, "zero:sparse=dense")
            return step

        return make

    @override
    def attach(self, strategy: Zero, model: Any, update: Update) -> None:
        """See `ZeroBinding.attach`: shards the model's variables."""
        if strategy.shard is not None:
            raise ConfigurationError("zero=3:shard= does not work with Keras; leave it out, or use zero=2")
        from unidist_zero._keras import stage3_step

        stage3_step.attach(model, update)


def _check_rounding(strategy: Zero, update: Update) -> None:
    """Raise ConfigurationError if state that is rounded cannot be where it is wanted."""
    precision = update.options.precision
    if precision is None or precision.rounding is None:
        return
    for is_wanted, what in (
        (strategy.offload is not None, "zero:offload"),
        (update.context.is_elastic, "zero in an elastic job"),
    ):
        if is_wanted:
            raise ConfigurationError(
                f"precision=bf16:states=bf16 and {what} do not work together with tensorflow; leave one of them out"
            )


def _kind_of_step(strategy: Zero, update: Update) -> type[ShardedStep]:
    if update.context.is_elastic:
        from unidist_zero._keras.elastic import ElasticFragmentStep, ElasticStep

        return ElasticFragmentStep if strategy.stage == 3 else ElasticStep
    if strategy.stage == 3:
        from unidist_zero._keras.stage3_step import FragmentStep

        return FragmentStep
    return ShardedStep


class ShardedStep(InnerStep):
    """See the module's text.

    Args:
        optimizer: the bound optimizer.
        plain: its class before it was bound.
        update: the framework-free side.
    """

    sharded = True
    check_rows: RowCheck | None = None
    """Knows whether the optimizer wants each row of a sparse gradient by itself; None: they are added up in any case.
    """
    whole = "auto"
    """Whether the optimizer needs whole variables; "auto": it is tried on small ones."""
    files: SpillFolder | None = None
    """Where state is kept between two updates; None: in memory."""
    in_files: StateInFiles | None = None
    """Keeps it there, once the optimizer is built."""

    def __init__(self, optimizer: Any, plain: type[Any], update: Update) -> None:
        self._optimizer = optimizer
        self._plain = plain
        self._update = update
        self._host_functions: list[HostFunction] = []
        self._inner = getattr(optimizer, "inner_optimizer", optimizer)
        self._is_built = False
        self._shards: list[VariableShard] = []
        self._variables: list[Any] = []  # of the model, by place
        self._decaying: list[bool] = []  # by place
        self._nothing: Any = None
        self._update_by = update_by(optimizer, plain, update.options.precision)
        self._clipping: ShardedClipping | None = None
        self._gathers: list[VariableGather] = []

    @property
    @override
    def keeps_parameters(self) -> bool:
        """See `InnerStep.keeps_parameters`: shards are filled from the model before each step."""
        return self._update.options.precision is None

    @property
    @override
    def is_built(self) -> bool:
        return self._is_built

    @override
    def own_gradient(self, variable: Any, gradient: Gradient | None) -> Gradient | None:
        gradient = super().own_gradient(variable, gradient)
        if isinstance(gradient, tf.IndexedSlices) and (self.check_rows is None or self.check_rows.allows_sums):
            return tf.convert_to_tensor(gradient)
        return gradient

    @override
    def equal_everywhere(self, model: Any) -> list[Any]:
        """See `InnerStep.equal_everywhere`: not what the optimizer keeps for shards."""
        return [*model.weights, *([] if self._is_built else self._optimizer.variables)]

    # Building

    @override
    def prepare(self, variables: Sequence[Any]) -> None:
        """See `InnerStep.prepare`: says whether variables may be cut."""
        kind = self._plain if self._inner is self._optimizer else type(self._inner)
        forms = [(str(getattr(each, "path", each.name)), tuple(each.shape)) for each in variables]
        whole = self.whole == "true" or (self.whole == "auto" and needs_whole_variables(self._inner, kind, forms))
        self._update.options = replace(self._update.options, whole_tensors=whole)

    @override
    def build(self, entries: Sequence[Entry], exchange: Callable[[], FusedExchange]) -> None:
        """See `InnerStep.build`: for the shards, for local variables, and for a zero.

        The zero is stepped on where nothing else has a gradient on this rank: Keras refuses a step with nothing to do.
        """
        self._variables = [entry.variable for entry in entries if entry.place is not None]
        local = [entry.variable for entry in entries if entry.place is None]
        if any(getattr(variable, "overwrite_with_gradient", False) for variable in self._variables):
            raise UsageError("variables that are overwritten with their gradients (float8) cannot be sharded")
        exchange()
        with tf.init_scope():
            kept = save_state(self._inner, self._variables, local) if self._optimizer.built else None
            outer = (
                save_state(self._optimizer, [], []) if kept is not None and self._inner is not self._optimizer else None
            )
            self._decaying = [self._decays(variable) for variable in self._variables]
            self._shards = self._make_shards()
            shards = [shard.variable for shard in self._shards]
            self._nothing = keras.Variable(np.zeros(1, "float32"), dtype="float32", name="nothing")
            self._exclude_from_decay()
            self._plain.build(self._optimizer, [*shards, *local, self._nothing])
            self._restore(kept, outer, len(local))
        self._override()
        self._is_built = True

    def _make_shards(self) -> list[VariableShard]:
        """Return this rank's shards of `_variables`, when the exchanges are there."""
        precision = self._update.options.precision
        dtypes = [dtype_of(variable) for variable in self._variables]
        masters = dtypes if precision is None else [precision.master_dtype(dtype) for dtype in dtypes]
        order = self._update.in_groups([str(getattr(each, "path", each.name)) for each in self._variables])
        shards: list[VariableShard] = []
        self._gathers = []
        begin = 0
        for number, exchange in enumerate(self._update.exchanges):
            assert isinstance(exchange, ReduceScatterExchange)
            places = order[begin : begin + len(exchange.parameters)]
            begin += len(places)
            partition = exchange.partition.numbered(places)
            owner = exchange.shard_groups[HOST].communicator.rank
            own = make_shards(partition, owner, self._variables, masters, self._decaying, exchange=number)
            self._gathers.append(VariableGather(exchange, partition, own, self._update.context.recorder))
            shards += own
        return shards

    @property
    def communicator(self) -> Communicator:
        """Over the shard group."""
        return self._exchange.shard_groups[HOST].communicator

    @property
    def _everyone(self) -> Communicator:
        return self._exchange.everyone

    @property
    def _exchange(self) -> ReduceScatterExchange:
        exchange = self._update.exchanges[0]
        assert isinstance(exchange, ReduceScatterExchange)
        return exchange

    def _memory(self, place: int, shard: VariableShard) -> Buffer:
        """Return the memory that holds the gradient of a shard."""
        segment, exchange = shard.segment, self._update.exchanges[shard.exchange]
        assert isinstance(exchange, ReduceScatterExchange)
        begin = exchange.partition.buckets[segment.bucket].begin(exchange.shard_groups[HOST].communicator.rank)
        return exchange.shard(segment.bucket).slice(segment.offset - begin, segment.count)

    def _fill(self, shard: VariableShard, variables: Sequence[Any]) -> None:
        """Copy what the script has assigned to the model's variables."""
        shard.fill(variables)

    def _gather_shards(self, variables: Sequence[Any]) -> None:
        """Send the shards to all ranks. Collective."""
        for gather in self._gathers:
            gather.run(variables)

    def _decays(self, variable: Any) -> bool:
        value = variable.value if isinstance(variable, keras.Variable) else variable  # as Keras asks
        return bool(self._inner._use_weight_decay(value))

    def _exclude_from_decay(self) -> None:
        excluded = [shard.variable for shard in self._shards if not self._decaying[shard.places[0]]]
        if excluded or not all(self._decaying):
            self._inner.exclude_from_weight_decay(var_list=excluded)

    def _restore(self, kept: SavedState | None, outer: SavedState | None, num_local: int) -> None:
        if kept is not None:
            restore_state(self._inner, kept, self._shards, num_local)
        if outer is not None:
            restore_state(self._optimizer, outer, [], 0)

    def _override(self) -> None:
        inner = self._inner
        whole = self._update.options.whole_tensors
        clipping = ShardedClipping(
            inner, inner._clip_gradients, lambda: self.communicator, len(self._variables), whole=whole
        )
        self._clipping = clipping
        inner.__dict__["_clip_gradients"] = clipping
        if inner is not self._optimizer:  # a LossScaleOptimizer, which skips a step if a gradient is not finite
            self._optimizer.__dict__["check_finite"] = self._check_finite
        if self.files is not None:
            self.in_files = StateInFiles(inner, self.files)
            for shard in self._shards:
                with tf.init_scope():
                    self.in_files.move(variable_and_slots(inner, shard.variable))

    def _check_finite(self, gradients: Sequence[Any]) -> tf.Tensor:
        """Return whether the gradients of all ranks are finite; the same on all."""
        finite = self._plain.check_finite(self._optimizer, gradients)
        flags = tf.cast(tf.reshape(finite, [1]), tf.uint8)
        return exchanged(self._everyone, flags, DType.UINT8, ReduceOp.MIN)[0] > 0

    # Steps

    @override
    def step_eagerly(self, exchange: FusedExchange, entries: Sequence[Entry], result: ExchangeResult) -> None:
        self._step_now(exchange, entries, result.present, self._variables)

    def _step_now(
        self, exchange: FusedExchange, entries: Sequence[Entry], present: Sequence[bool], variables: Sequence[Any]
    ) -> None:
        """Update the shards in eager mode. See `_step` for the arguments."""
        arrays = self._shard_gradients(exchange)
        self._step(
            entries, [tf.constant(present), *self._gradients(exchange, map(tf.constant, arrays))], present, variables
        )

    @override
    def exchange_outputs(self, exchange: FusedExchange, entries: Sequence[Entry]) -> ExchangeOutputs:
        """See `InnerStep.exchange_outputs`: who has a gradient, and the gradients of the shards."""
        specs = [tf.TensorSpec([len(self._variables)], tf.bool)]
        for shard in self._shards:
            shape, dtype = tuple(shard.variable.shape), shard.variable.dtype
            if shard.is_sparse(exchange):
                rest = shape[1:]
                specs += [tf.TensorSpec([None, *rest], dtype), tf.TensorSpec([None], tf.int64)]
            else:
                specs.append(tf.TensorSpec(shape, dtype))
        return ExchangeOutputs(specs, lambda result: [np.array(result.present, bool), *self._shard_gradients(exchange)])

    @override
    def step_in_graph(
        self, exchange: FusedExchange, entries: Sequence[Entry], outputs: Sequence[tf.Tensor]
    ) -> Sequence[tf.Tensor]:
        self._step(entries, [outputs[0], *self._gradients(exchange, outputs[1:])], None, self._variables)
        return outputs[1:]

    def _gradients(self, exchange: FusedExchange, tensors: Iterable[tf.Tensor]) -> list[Gradient]:
        """Return the gradients of the shards, of tensors of the arrays that `_shard_gradients` returned."""
        given = iter(tensors)
        return [
            tf.IndexedSlices(next(given), next(given), tf.constant(tuple(shard.variable.shape)))
            if shard.is_sparse(exchange)
            else next(given)
            for shard in self._shards
        ]

    def _shard_gradients(self, exchange: FusedExchange) -> list[Array]:
        """Return an array for each shard; values and indices, if one of its gradients is sparse."""
        arrays: list[Array] = []
        for place, shard in enumerate(self._shards):
            factor = self._update.exchanges[shard.exchange].pending_factor
            view = array_of_buffer(self._memory(place, shard), tuple(shard.variable.shape))
            if shard.is_widened():
                wide = empty_array(view.shape, np.dtype(shard.variable.dtype))
                np.multiply(view, wide.dtype.type(factor), out=wide, dtype=wide.dtype)
                arrays.append(wide)
            elif factor != 1.0:
                arrays.append(view * view.dtype.type(factor))
            else:
                arrays.append(exchange.given(view))
            if shard.is_sparse(exchange):
                slices = shard.with_slices(arrays.pop(), exchange)
                arrays += [slices.values, slices.indices]
        return arrays

    def _step(
        self,
        entries: Sequence[Entry],
        outputs: Sequence[Gradient],
        known: Sequence[bool] | None,
        variables: Sequence[Any],
    ) -> None:
        """Update the shards, and gather them.

        Args:
            entries: of the call.
            outputs: whether any rank has a gradient, `(places,)`, and the gradients of the shards, dense or sparse.
            known: for each place whether any rank has a gradient; None: known only when the graph runs.
            variables: of the model, by place, or stand-ins for them.
        """
        present, *gradients = outputs
        certain = {entry.place for entry in entries if entry.place is not None and entry.gradient is not None}
        if known is not None:
            certain = {place for place, is_present in enumerate(known) if is_present}
        local = [entry for entry in entries if entry.place is None and entry.gradient is not None]
        stepped: list[tuple[VariableShard, Any]] = []
        kept: list[tuple[VariableShard, Any, tf.Tensor]] = []
        for shard, gradient in zip(self._shards, gradients, strict=True):
            self._fill(shard, variables)
            if not shard.segment.count or (known is not None and not certain.intersection(shard.places)):
                continue
            stepped.append((shard, gradient))
            if not certain.issuperset(shard.places):  # made what it was after the step, where nobody has a gradient
                kept += [
                    (shard, each, tf.identity(each)) for each in variable_and_slots(self._optimizer, shard.variable)
                ]

        def restore() -> None:
            for shard, each, before in kept:
                flags = tf.gather(present, shard.places)
                mask = shard.spread(flags, True) if tuple(each.shape) == tuple(shard.variable.shape) else flags[0]
                each.assign(tf.where(mask, tf.convert_to_tensor(each), before))

        added = AddedOperations()
        with restoring(self._optimizer, restore):
            self._apply(stepped, local, nobody=known is not None and not any(known))
        with tf.control_dependencies(added.stateful()):  # a bucket of which this rank has nothing waits for no value
            self._gather_shards(variables)
        for place, variable in enumerate(variables):
            if getattr(variable, "constraint", None) is not None:  # which wants to see all of it
                value = tf.convert_to_tensor(variable)
                variable.assign(tf.where(present[place], variable.constraint(value), value))

    def _apply(self, stepped: Sequence[tuple[VariableShard, Any]], local: Sequence[Entry], *, nobody: bool) -> None:
        shards: list[VariableShard | None] = [shard for shard, _ in stepped]
        gradients = [gradient for _, gradient in stepped] + [entry.gradient for entry in local]
        variables = [shard.variable for shard, _ in stepped] + [entry.variable for entry in local]
        shards += [None] * len(local)
        if not gradients:
            shards.append(None)
            gradients.append(None if nobody else tf.zeros([1], tf.float32))
            variables.append(self._nothing)
        assert self._clipping is not None
        self._clipping.shards = shards
        self._update_by(gradients, variables, {id(shard.variable): shard.elements for shard, _ in stepped})

    @override
    def kept_state(self, models: Mapping[str, Any]) -> KeepsState | None:
        if not self._is_built:
            return None  # it has no state, or still all of it
        from unidist_zero._keras.state import ShardedOptimizerState

        return ShardedOptimizerState(self._optimizer, models, self._variables, self._shards)

    @override
    def finalize(self, variables: Sequence[Any]) -> None:
        if not self._is_built or not self._inner.use_ema:
            return
        self._plain.finalize_variable_values(self._optimizer, self._optimizer._trainable_variables)
        self._gather_shards(self._variables)
