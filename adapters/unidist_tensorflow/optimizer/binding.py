"""The state of one bound Keras optimizer: gradients out of the graph, through the exchange, and back to Keras.

`apply` adds three nodes to a graph: the exchange of all gradients, what the inner step makes of the reduced ones, and
one that says that the update is done. The last one has a second purpose: it takes the reduced gradients as inputs, so
that TensorFlow, which reuses the memory of tensors that nobody else waits for, never makes a variable of engine memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from unidist.errors import PluginError, UsageError
from unidist.gradients.buckets import ParameterInfo
from unidist.negotiation.objects import gather_objects
from unidist.optim.actors import check_keeps_parameters
from unidist.optim.update import Update
from unidist.runtime import context
from unidist.training.mean_loss import MeanLoss
from unidist_arrays.fused_exchange import ExchangeResult, FusedExchange
from unidist_keras.arguments import with_groups
from unidist_keras.losses.weight import WeightsLoss
from unidist_keras.running_statistics import SharesStatistics, average_statistics, statistics_of
from unidist_keras.slots import variable_and_slots
from unidist_tensorflow.framework import TensorFlowFramework
from unidist_tensorflow.gradients.tensors import (
    AddedOperations,
    Gradient,
    HostFunction,
    exchange_eagerly,
    exchange_in_graph,
    host_node,
)
from unidist_tensorflow.memory import Array, dtype_of
from unidist_tensorflow.operations.errors import as_op_errors
from unidist_tensorflow.operations.functions import broadcast_variables
from unidist_tensorflow.operations.graph import unconverted
from unidist_tensorflow.optimizer.acting import ActingStep
from unidist_tensorflow.optimizer.gathered_step import CutVariable, GatheredStep
from unidist_tensorflow.optimizer.inner_step import Entry, InnerStep, WholeStep, is_of_keras
from unidist_tensorflow.optimizer.local_sums import LocalSums
from unidist_tensorflow.optimizer.preconditions import check_can_distribute

_SCALE = tf.TensorSpec([], tf.float64)

_READS = frozenset({"ReadVariableOp", "ResourceGather", "VariableShape"})


class Binding(WeightsLoss, SharesStatistics):
    """The state of one bound optimizer.

    Args:
        optimizer: the optimizer, already of its new class.
        plain: its class before.
        update: the framework-free side.
        gathered: the variables that are cut, if the optimizer looks at whole ones.

    Attributes:
        distributed_update: see Args.
        inner: what updates the variables.
        scale_local: gradients of local variables are divided by the number of ranks, as those that are averaged.
        groups: lists of variables whose gradients travel together, or None; until the first update.
    """

    def __init__(self, optimizer: Any, plain: type[Any], update: Update, gathered: Sequence[CutVariable] = ()) -> None:
        self.scale_local = True
        self.groups: Sequence[Sequence[Any]] | None = None
        self._optimizer = optimizer
        self._plain = plain
        self._update = self.distributed_update = update
        self._exchange: FusedExchange | None = None
        self._places: dict[Any, int] = {}  # of exchanged variables by key
        self._variables: list[Any] = []  # the exchanged ones
        self._local: set[Any] = set()
        self._local_sums = LocalSums()  # of several passes
        self._built_for: list[Any] | None = None  # what `build` was called for, after the optimizer was bound
        self._initial: Callable[[], Sequence[Any]] | None = None
        self._of_model: Callable[[], Sequence[Any]] | None = None
        self._started = False
        self._passes_vary = False
        self._host_functions: list[HostFunction] = []
        self._acting = ActingStep(update, self._host_functions)
        self._gathered = gathered
        self.inner = self._make_inner()
        if update.actors is not None:
            check_keeps_parameters(self.inner, update.actors.names)

    def _make_inner(self) -> InnerStep:
        brings, gathered = self._update.inner_steps, self._gathered
        if brings is None and gathered:
            return GatheredStep(self._optimizer, self._plain, self._update, gathered)
        if brings is None:
            return WholeStep(self._optimizer, self._plain, self._variable_and_slots, self._update.options.precision)
        if gathered:
            names = ", ".join(strategy.name for strategy in self._update.strategies)
            raise UsageError(
                f"{self._plain.__name__} looks at a variable's whole tensor, and {gathered[0].placement.name!r} (with "
                f"{len(gathered) - 1} more) is cut over ranks, where a strategy here ({names}) makes the step in its "
                "own way. Leave zero out, or use an element-wise optimizer (SGD, Adam, AdamW, RMSprop, ...), or "
                "pipeline in place of tensor"
            )
        make = brings.inner_step(TensorFlowFramework(), self._update.context)
        made = make(self._optimizer, self._plain, self._update)
        if not isinstance(made, InnerStep):
            raise PluginError(f"{type(made).__qualname__} does not derive from unidist_tensorflow.optimizer.InnerStep")
        return made

    @property
    def variables(self) -> Sequence[Any]:
        """The variables whose gradients are exchanged, by place."""
        return self._variables

    def register_local(self, variable: Any) -> None:
        """Leave a variable out of the exchange; before the first update, the same ones on every rank."""
        if self._exchange is not None:
            raise UsageError("register_local_var() belongs before the first update: the exchange is set up already")
        self._local.add(self._key(variable))

    def belongs_to(self, variables: Callable[[], Sequence[Any]]) -> None:
        """Set a function that returns the variables of the optimizer, once they exist."""
        self._of_model = variables

    def broadcast_when_built(self, variables: Callable[[], Sequence[Any]]) -> None:
        """Give every rank rank 0's variables as soon as they exist; by `broadcast_initial` or the first `apply`."""
        self._initial = variables

    def broadcast_initial(self) -> None:
        """Do the broadcast that `broadcast_when_built` has deferred. Collective, the first time."""
        if self._initial is not None:
            initial, self._initial = self._initial, None
            if self._update.context.is_elastic and self._update.context is not context.current():
                return  # in a later generation: the elastic state was synchronised, on ranks that came later too
            with tf.init_scope():  # at once, also while a function is being traced: before its first run
                broadcast_variables(initial(), root_rank=0)

    def build(self, variables: Sequence[Any]) -> None:
        """Build the optimizer for these variables of the model. Collective if its state is sharded."""
        self._built_for = list(variables)
        self._variables = [variable for variable in self._built_for if self._key(variable) not in self._local]
        self._places = {self._key(variable): place for place, variable in enumerate(self._variables)}
        self.inner.build(self._entries(self._built_for, [None] * len(self._built_for)), self.exchange)

    def built_anywhere(self) -> bool:
        """Return whether any rank has built the optimizer: maybe only rank 0 has loaded it. Collective."""
        return any(gather_objects(self._update.communicator, self._optimizer.built))

    def build_early(self, variables: Sequence[Any]) -> None:
        """Build the optimizer before its first update, if needed. Collective.

        Ranks may differ in whether it is built: it may be rank 0 only that has loaded it.
        """
        if self.inner.is_built or not variables:
            return
        if self.inner.sharded:
            if not self.built_anywhere():
                return  # with the first update: until then variables may be left out
            if not self._optimizer.built:
                self._plain.build(self._optimizer, list(variables))
        with keras.name_scope(self._optimizer.name, caller=self._optimizer):
            self.build(variables)
        self._optimizer.built = True

    def build_to_load(self) -> None:
        """Shard the state of an optimizer over the present ranks, to be loaded. Collective."""
        if not self.inner.sharded:
            return
        variables = list(self._of_model()) if self._of_model is not None and not self.inner.is_built else []
        with keras.name_scope(self._optimizer.name, caller=self._optimizer):
            if variables:
                self.build(variables)
                self._optimizer.built = True
            elif self.inner.is_built:
                self.inner.divide_again(self.exchange)

    def rebind(self) -> None:
        """Go on in the present generation of an elastic job now, which otherwise the next update does. Collective.

        For the optimizer of a model that is divided: ranks that have joined bind theirs at the same time.
        """
        self._set_up()
        assert self._exchange is not None
        self._exchange.follow()
        self.build_to_load()

    def exchange(self) -> FusedExchange:
        """Return the exchange of this optimizer's gradients, agreed on by all ranks. Collective the first time."""
        self.broadcast_initial()
        self._set_up()
        assert self._exchange is not None
        with tf.init_scope(), as_op_errors():
            self._exchange.prepare()
        return self._exchange

    @unconverted
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Exchange the gradients, and let the inner step apply them."""
        gradients = list(grads)
        if not gradients:
            return
        check_can_distribute()
        variables = self._build(trainable_variables)
        self.broadcast_initial()
        self._started = True
        update = self._update
        plainly = update.inner_steps is None and update.rules is None and update.actors is None
        is_alone = update.num_ranks == 1 and not update.context.is_elastic  # else others may come
        if plainly and is_alone and update.accumulation.passes == 1 and isinstance(self.inner, WholeStep):
            self.inner.apply(gradients, variables)
            self._count([])
            return
        self._set_up()
        if len(gradients) != len(variables):
            raise UsageError(f"{len(gradients)} gradients for {len(variables)} variables: give one for each, or None")
        variables, gradients = self._complete(variables, self.weighted_gradients(gradients))
        for i, variable in enumerate(variables):
            if self._key(variable) in self._places:
                gradients[i] = self.inner.own_gradient(variable, gradients[i])
            elif self._sums_local:
                self._local_sums.add(self._key(variable), variable, gradients[i])
        if self.inner.sharded and not self._update.context.is_elastic:  # there a rank that joins traces alone
            self._agree_on_sparse(self._own(variables, gradients))
        if tf.executing_eagerly():
            self._apply_eagerly(variables, gradients)
        else:
            self._apply_in_graph(variables, gradients)

    def takes_pieces(self) -> None:
        """Let the number of passes of an update change from one to the next; before anything is traced."""
        self._passes_vary = True

    def accumulate_steps(self, steps: int) -> None:
        """Let the next update take this many steps, see `Update.accumulate_steps`."""
        if self._exchange is None:
            self._update.accumulate_steps(steps)
        else:
            self._exchange.accumulate_steps(steps)

    @override
    def times(self, value: Any, weight: Any) -> Any:
        if isinstance(value, tf.IndexedSlices):
            return tf.IndexedSlices(self.times(value.values, weight), value.indices, value.dense_shape)
        return value * tf.cast(weight, value.dtype)

    @override
    def num_samples(self, inputs: Any) -> Any:
        if isinstance(inputs, tf.RaggedTensor):
            return inputs.nrows()
        return inputs.dense_shape[0] if isinstance(inputs, tf.SparseTensor) else tf.shape(inputs)[0]

    @override
    def weight_of(self, samples: Any) -> Any:
        def exchange(own: Array) -> list[Array]:
            return [np.asarray(context.current().owned(MeanLoss).weight_of(float(own)))]

        return host_node(exchange, [tf.cast(samples, tf.float64)], [_SCALE], name="unidist_samples_of_a_step")[0]

    @override
    def after_step(self, model: Any, given: Sequence[Any], result: Any) -> Any:
        statistics = [each for each in statistics_of(model) if _may_have_changed(each.value)]
        if statistics:
            for variable, mean in zip(statistics, self.means([each.value for each in statistics]), strict=True):
                variable.assign(mean)
        return result

    @override
    def _averaged(self, flat: Any) -> Any:
        def exchange(own: Array) -> list[Array]:
            values = np.array(own)
            average_statistics(values)
            return [values]

        return host_node(exchange, [flat], [tf.TensorSpec(flat.shape, flat.dtype)], name="unidist_statistics")[0]

    def flush(self) -> bool:
        """Apply a window that was cut short; returns whether there was anything to apply."""
        if not tf.executing_eagerly():
            raise UsageError("flush() belongs outside of tf.function: it says whether there was anything to apply")
        if self._update.accumulation.passes == 1 or not self._started:
            return False
        self._set_up()
        assert self._exchange is not None
        with as_op_errors():
            result = self._exchange.flush()
        if result is None or not result.complete:
            return False
        self._step_eagerly(self._trained, [None] * len(self._trained), result)
        return True

    @property
    def passes(self) -> int:
        """Passes that make one update."""
        return self._update.accumulation.passes

    # Which variables

    def _key(self, variable: Any) -> Any:
        return self._optimizer._var_key(variable)

    def _build(self, variables: Any) -> list[Any]:
        optimizer = self._optimizer
        if not self.inner.is_built:
            if variables is None and optimizer.built:
                variables = self._trained
            if variables is None:
                raise ValueError("the optimizer is not built: give the variables along with the gradients")
            with keras.name_scope(optimizer.name, caller=optimizer):
                self.build(list(variables))
            optimizer.built = True
        return list(self._trained if variables is None else variables)

    @property
    def _trained(self) -> list[Any]:
        """The variables of the model that the optimizer is for."""
        return list(self._optimizer._trainable_variables if self._built_for is None else self._built_for)

    def _set_up(self) -> None:
        if self._exchange is not None:
            return
        if self._update.rules is not None:
            self._check_rules()
        if self._local and self._update.context.is_elastic:
            raise UsageError(
                "local variables in an elastic job: a graph divides their gradients by the number of ranks that there "
                "were when it was traced. Leave register_local_var out"
            )
        self._variables = [v for v in self._trained if self._key(v) not in self._local]
        self._places = {self._key(variable): place for place, variable in enumerate(self._variables)}
        self.inner.prepare(self._variables)
        self._update.options = with_groups(self._update.options, self.groups, self._key, self._places)
        infos = [ParameterInfo(str(getattr(v, "path", v.name)), tuple(v.shape), dtype_of(v)) for v in self._variables]
        sharded = self.inner.sharded
        self._exchange = FusedExchange(
            self._update,
            infos,
            lambda: [self.inner.held(variable) for variable in self._variables],
            keeps_results=not is_of_keras(self._optimizer, self._plain, self._trained),
            gathers=not self._update.options.sparse_as_dense,
            step_on_joined=self._step_on_joined if sharded else None,
        )

    def _check_rules(self) -> None:
        """Refuse options that leave gradients scaled, or unclipped."""
        for optimizer in (self._optimizer, getattr(self._optimizer, "inner_optimizer", self._optimizer)):
            if hasattr(optimizer, "inner_optimizer") or getattr(optimizer, "loss_scale_factor", None) is not None:
                raise UsageError(
                    f"{type(self._optimizer).__name__} scales the loss by itself, and a strategy clips or scales "
                    "gradients too: it would see them scaled. Give the plain optimizer, and --strategy precision=fp16"
                )
        if self._local:
            raise UsageError(
                "local variables and a strategy that clips or scales gradients do not go together: the norm would "
                "differ between the ranks. Leave register_local_var out"
            )

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss multiplied by the scale of a strategy, or None without one."""
        scaler = self._update.scaler
        if scaler is None:
            return None
        scaler.was_applied = True
        [scale] = host_node(lambda: [np.asarray(scaler.scale)], [], [_SCALE], name="unidist_loss_scale")
        loss = tf.cast(loss, tf.float64 if loss.dtype == tf.float64 else tf.float32)  # float16 does not reach so far
        return loss * tf.cast(scale, loss.dtype)

    def _complete(self, variables: list[Any], gradients: list[Any]) -> tuple[list[Any], list[Any]]:
        """Add the variables that were not given: another rank may have a gradient for them."""
        given = {self._key(variable) for variable in variables}
        wanted = self._trained if self._sums_local else self._variables  # earlier passes may have had local gradients
        missing = [v for v in wanted if v.trainable and self._key(v) not in given]
        unknown = given - self._places.keys() - self._local
        if unknown:
            names = [str(getattr(v, "path", v.name)) for v in variables if self._key(v) in unknown]
            raise ValueError(
                f"unknown variables {names}: the optimizer was built for others. Make a new optimizer for them"
            )
        return variables + missing, gradients + [None] * len(missing)

    def _own(self, variables: Sequence[Any], gradients: Sequence[Any]) -> dict[int, Gradient]:
        """Return this rank's gradients to exchange, by place."""
        own: dict[int, Gradient] = {}
        for variable, gradient in zip(variables, gradients, strict=True):
            place = self._places.get(self._key(variable))
            if gradient is not None and place is not None:
                own[place] = gradient
        return own

    def _scaled(self, gradient: Any) -> Any:
        """Return the gradient of a local variable as it is applied."""
        if gradient is None or not self.scale_local:
            return gradient
        size = self._update.num_ranks
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
        return gradient / size

    def _entries(self, variables: Sequence[Any], gradients: Sequence[Any]) -> list[Entry]:
        entries = []
        for variable, gradient in zip(variables, gradients, strict=True):
            place = self._places.get(self._key(variable))
            entries.append(Entry(variable, self._scaled(gradient) if place is None else gradient, place))
        return entries

    @property
    def _sums_local(self) -> bool:
        """Whether gradients of local variables are summed up over the passes of an update."""
        return self.passes > 1 and bool(self._local)

    def _with_local_sums(self, entries: list[Entry]) -> list[Entry]:
        """Return the entries of an update, of several passes with the sums of the gradients of local variables."""
        exchange = self._exchange
        if not self._sums_local or exchange is None:
            return entries
        update = self._update
        averaged = update.num_ranks if update.average else 1  # by which the factor of the exchanged sums divides, too
        divisor = update.num_ranks if self.scale_local else 1
        [scale] = host_node(
            lambda: [np.asarray(exchange.scale)], [], [_SCALE], name="unidist_scale", keeper=self._host_functions
        )
        found = []
        for entry in entries:
            if entry.place is not None:
                found.append(entry)
                continue
            total = self._local_sums.take(self._key(entry.variable), scale * (averaged / divisor))
            if total is not None:
                found.append(replace(entry, gradient=total))
        return found

    def _agree_on_sparse(self, own: Mapping[int, Gradient]) -> None:
        assert self._exchange is not None
        with tf.init_scope(), as_op_errors():
            self._exchange.agree_on_sparse(
                {place for place, gradient in own.items() if isinstance(gradient, tf.IndexedSlices)}
            )

    # Eager mode

    def _apply_eagerly(self, variables: list[Any], gradients: list[Any]) -> None:
        assert self._exchange is not None
        result = exchange_eagerly(self._exchange, self._own(variables, gradients))
        if result.complete:
            self._step_eagerly(variables, gradients, result)
        else:
            self._pass_without_update()

    def _step_eagerly(self, variables: list[Any], gradients: list[Any], result: ExchangeResult) -> None:
        exchange = self._exchange
        assert exchange is not None
        entries = self._with_local_sums(self._entries(variables, gradients))
        self._acting.around(self._variables, self.inner, lambda: self.inner.step_eagerly(exchange, entries, result))
        self._update.applied()

    def _step_on_joined(self, result: ExchangeResult) -> None:
        """Update this rank's shard on a rank that has joined and has no gradients."""
        self._step_eagerly(self._variables, [None] * len(self._variables), result)

    # Graphs

    def _apply_in_graph(self, variables: list[Any], gradients: list[Any]) -> None:
        exchange = self._exchange
        assert exchange is not None
        entries = self._entries(variables, gradients)
        taken = self.inner.exchange_outputs(exchange, entries)
        complete, outputs = exchange_in_graph(exchange, self._own(variables, gradients), taken, self._host_functions)
        if self._update.accumulation.passes == 1 and self._update.scaler is None and not self._passes_vary:
            self._step_in_graph(exchange, entries, outputs)
        else:
            tf.cond(complete, lambda: self._step_in_graph(exchange, entries, outputs), self._pass_without_update)

    def _pass_without_update(self) -> bool:
        """Do what a pass asks for that makes no update, eagerly or in a graph's branch; returns False."""
        return False

    def _step_in_graph(self, exchange: FusedExchange, entries: list[Entry], outputs: list[tf.Tensor]) -> bool:
        added = AddedOperations()
        entries = self._with_local_sums(entries)
        if self._sums_local:  # of a branch's graph, as the sums are: Keras takes gradients of one graph alone
            outputs = [tf.identity(each) for each in outputs]
        memory = self._acting.around(
            self._variables, self.inner, lambda: self.inner.step_in_graph(exchange, entries, outputs)
        )
        with tf.control_dependencies(added.stateful()):
            self._count(memory)
        return True

    def _variable_and_slots(self, variable: Any) -> list[Any]:
        """Return the variable and its slots in the optimizer: momentum and the like."""
        return variable_and_slots(self._optimizer, variable)

    def _count(self, gradients: Sequence[tf.Tensor]) -> None:
        """Report the end of the update, after everything before; the gradients live until then."""
        if tf.executing_eagerly():
            self._update.applied()
            return

        def applied(*_: Array) -> list[Array]:
            self._update.applied()
            return [np.asarray(True)]

        name = "unidist_end_of_update_which_needs_jit_compile_False"
        host_node(applied, gradients, [tf.TensorSpec([], tf.bool)], name=name, keeper=self._host_functions)


def _may_have_changed(variable: tf.Variable) -> bool:
    """Return whether the graph that is being built assigns to a variable, or hands it to a function that may."""
    if tf.executing_eagerly():
        return True
    graph = tf.compat.v1.get_default_graph()
    own = next((inner for outer, inner in graph.captures if outer is variable.handle), None)
    return own is not None and any(op.type not in _READS for op in own.consumers())
