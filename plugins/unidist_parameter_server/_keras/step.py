"""The inner step of a Keras optimizer whose variables are in a store.

A node of the host, in graphs as in eager mode, takes the variables and what the optimizer keeps for them, pushes, and
returns the variables' new values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from unidist.errors import ConfigurationError, UsageError
from unidist.optim import Update
from unidist_keras.checkpoint import OptimizerState
from unidist_keras.slots import variable_and_slots
from unidist_parameter_server._keras.rules import check_counterpart, rules_of
from unidist_parameter_server.binding import ParameterServerBinding
from unidist_parameter_server.optimizers import AddDifference, Rule
from unidist_parameter_server.workers import PushExchange, Worker, WorkerOptions
from unidist_tensorflow.gradients import (
    ExchangeOutputs,
    ExchangeResult,
    FusedExchange,
    Gradient,
    HostFunction,
    host_node,
)
from unidist_tensorflow.memory import Array, dtype_of, empty_array
from unidist_tensorflow.optimizer import Entry, InnerStep, RowCheck, WholeStep

if TYPE_CHECKING:
    from unidist.checkpoint.format.interface import KeepsState
    from unidist.checkpoint.format.pieces import Piece
    from unidist.optim import MakesInnerStep
    from unidist.runtime_api import RuntimeAPI
    from unidist_parameter_server.strategy import ParameterServer

_NAME = "unidist_push_and_fetch_which_needs_jit_compile_False"


class KerasParameterServer(ParameterServerBinding):
    """See `ParameterServerBinding`."""

    @override
    def inner_step(self, strategy: ParameterServer) -> MakesInnerStep:
        options = strategy.worker_options()

        def make(optimizer: Any, plain: type[Any], update: Update) -> InnerStep:
            update.options = replace(update.options, sparse_as_dense=True)
            if not options.difference:
                check_counterpart(optimizer, plain)
            kind = DifferenceStep if options.difference else GradientStep
            step: GradientStep | DifferenceStep = kind(options, optimizer, plain, update)
            if strategy.sparse is None:
                step.check_rows = RowCheck(optimizer, plain, "parameter_server:sparse=dense")
            return step

        return make


class VariablesInStore:
    """The variables of one optimizer, and this worker's access to the store.

    Args:
        options: of the strategy.
        optimizer: the bound optimizer.
        plain: its class before it was bound.
        update: the framework-free side.
    """

    def __init__(self, options: WorkerOptions, optimizer: Any, plain: type[Any], update: Update) -> None:
        self.variables: list[Any] = []
        self._options = options
        self._optimizer = optimizer
        self._plain = plain
        self._update = update
        self._host_functions: list[HostFunction] = []
        self._worker: Worker | None = None
        self._context: RuntimeAPI | None = None
        self._names: tuple[str, ...] = ()
        self.is_filled = False
        self._targets: list[Array] = []
        self._slots: list[list[Any]] = []

    @property
    def is_built(self) -> bool:
        """Whether `build` was called."""
        return self._worker is not None

    def build(self, entries: Sequence[Entry]) -> None:
        """Make the store, when the optimizer is built and the exchange is there. Collective."""
        if any(entry.place is None for entry in entries):
            raise UsageError("local variables are no parameters of a store: leave register_local_var out")
        self.variables = [entry.variable for entry in entries]
        if not self._options.difference:
            for variable in self.variables:
                if getattr(variable, "constraint", None) is not None:
                    raise ConfigurationError(
                        f"variable {variable.path!r} has a constraint, which parameter_server does not have in its "
                        "store. Add push=delta, with which each worker's own optimizer steps"
                    )
            names = rules_of(self._optimizer, self._plain, 0.0)[0].slots
            own = [variable_and_slots(self._optimizer, variable)[1:] for variable in self.variables]
            used = len(own[0]) if own else 0  # none where there is no momentum
            self._slots = [kept[: len(names)] for kept in own]
            self._names = names[:used]
        self._targets = [
            empty_array((_count(variable),), np.dtype(str(dtype_of(variable)))) for variable in self.variables
        ]
        self._make_worker()

    def _make_worker(self) -> Worker:
        """Make the store in the present runtime. Collective."""
        (exchange,) = self._update.exchanges
        assert isinstance(exchange, PushExchange)
        self._context = self._update.context
        self._worker = Worker(self._options, exchange, self._update.communicator, self._context, self._names)
        self._worker.set_targets(self._targets)
        self.is_filled = False
        return self._worker

    def is_of(self, context: RuntimeAPI) -> bool:
        """See `StoreStep.is_of`."""
        return self._context is context

    def close(self) -> None:
        """See `StoreStep.close`. In another runtime the next step makes another store."""
        self.is_filled = False
        if self._worker is not None:
            self._worker.store.leave()

    def push_and_fetch(self, present: tf.Tensor) -> None:
        """Push this worker's gradients, or what they have made of the variables, and assign what is fetched.

        Args:
            present: for each variable whether it has a gradient, bool.
        """
        inputs = [
            present,
            tf.cast(tf.convert_to_tensor(self._optimizer.learning_rate), tf.float64),
            tf.cast(tf.convert_to_tensor(self._optimizer.iterations), tf.int64),
            *(
                tf.convert_to_tensor(each)
                for each in (*self.variables, *(slot for kept in self._slots for slot in kept))
            ),
        ]
        specs = [tf.TensorSpec(variable.shape, tf.as_dtype(variable.dtype)) for variable in self.variables]
        new = host_node(self._step, inputs, specs, name=_NAME, keeper=self._host_functions)
        for variable, value in zip(self.variables, new, strict=True):
            variable.assign(value)

    def _step(self, present: Any, rate: Any, iterations: Any, *arrays: Array) -> list[Array]:
        if self._context is not self._update.context:
            self._make_worker()
        assert self._worker is not None
        count = len(self.variables)
        values = [np.asarray(array).reshape(-1) for array in arrays[:count]]
        self._prepare(values, [np.asarray(array).reshape(-1) for array in arrays[count:]], int(iterations))
        rules: list[Rule] = [AddDifference()] * count
        if self._options.difference:
            for target, value in zip(self._targets, values, strict=True):
                target[:] = value
        else:
            decayed, plain = rules_of(self._optimizer, self._plain, float(rate))
            rules = [decayed if self._decays(variable) else plain for variable in self.variables]
        self._worker.step(rules, np.asarray(present).tolist())
        return [self._fresh(place) for place in range(count)]

    def _prepare(self, values: Sequence[Array], slots: Sequence[Array], iterations: int) -> None:
        """Before the first update, and when the script has changed variables: fill the store. Collective then."""
        assert self._worker is not None
        if self.is_filled and not self._options.difference:
            pairs = zip(self._targets, values, strict=True)
            changed = [place for place, (target, value) in enumerate(pairs) if not _equal(target, value)]
            if changed and not self._options.together:
                raise UsageError(
                    f"the script has changed variable {self.variables[changed[0]].path!r} on rank "
                    f"{self._update.context.topology.rank}, but with parameter_server=async the variables are in the "
                    "store, where other ranks change them meanwhile. Change them before the first step, load them on "
                    "every rank with ud.load(path, model, optimizer), or use parameter_server=sync"
                )
            if changed:
                self.is_filled = False
        if self.is_filled:
            return
        for target, value in zip(self._targets, values, strict=True):
            target[:] = value
        per_variable = len(self._slots[0]) if self._slots else 0
        count = len(self.variables)
        self._worker.fill(lambda place, slot: slots[place * per_variable + slot], [iterations] * count, [0.0] * count)
        self.is_filled = True

    def _decays(self, variable: Any) -> bool:
        value = getattr(variable, "value", variable)  # as Keras asks
        return bool(self._optimizer._use_weight_decay(value))

    def _fresh(self, place: int) -> Array:
        """Return a copy of what was fetched, which TensorFlow may keep."""
        array = empty_array(tuple(self.variables[place].shape), self._targets[place].dtype)
        array.reshape(-1)[:] = self._targets[place]
        return array

    def pull(self) -> None:
        """See `StoreStep.pull`."""
        if self.is_filled:
            assert self._worker is not None
            self._worker.check_open()
            self._worker.fetch()
            with tf.init_scope():
                for place, variable in enumerate(self.variables):
                    variable.assign(self._fresh(place))

    def settle(self) -> None:
        """See `StoreStep.settle`. Collective."""
        if self.is_filled:
            assert self._worker is not None
            self._worker.check_open()
            self._worker.flush()
            self._update.communicator.barrier().wait()
            self.pull()
            self._update.communicator.barrier().wait()

    def bring(self) -> None:
        """See `StoreStep.bring`."""
        self.pull()
        self.bring_state()

    def bring_state(self) -> None:
        """Give the optimizer the state that the store has."""
        if not self.is_filled or not any(self._slots):
            return
        assert self._worker is not None
        self._worker.check_open()
        arrays = [
            [np.zeros_like(target) for _ in kept] for target, kept in zip(self._targets, self._slots, strict=True)
        ]
        self._worker.state(arrays)
        with tf.init_scope():
            for kept, found in zip(self._slots, arrays, strict=True):
                for slot, array in zip(kept, found, strict=True):
                    slot.assign(array.reshape(tuple(slot.shape)))

    def expect_other_values(self) -> None:
        """Fill the store again before the next update: variables and state are loaded now."""
        self.is_filled = False


class GradientStep(InnerStep):
    """Pushes gradients: the optimizer runs on the store.

    Args:
        options: of the strategy.
        optimizer: the bound optimizer. Its slots have values when a checkpoint is written, and before the first update.
        plain: its class before it was bound.
        update: the framework-free side.
    """

    check_rows: RowCheck | None = None
    sharded = True  # gradients of all ranks are nowhere
    shards_state = False

    def __init__(self, options: WorkerOptions, optimizer: Any, plain: type[Any], update: Update) -> None:
        self._optimizer = optimizer
        self._plain = plain
        self._stored = VariablesInStore(options, optimizer, plain, update)
        self.before: Any = None
        self.pull, self.settle, self.bring = self._stored.pull, self._stored.settle, self._stored.bring
        self.is_of, self.close, self.before_commit = self._stored.is_of, self._stored.close, self._stored.bring_state

    @property
    @override
    def is_built(self) -> bool:
        return self._stored.is_built

    @property
    def is_filled(self) -> bool:
        """See `StoreStep.is_filled`."""
        return self._stored.is_filled

    @override
    def own_gradient(self, variable: Any, gradient: Gradient | None) -> Gradient | None:
        if self.check_rows is not None and isinstance(gradient, tf.IndexedSlices):
            self.check_rows(variable)
        return super().own_gradient(variable, gradient)

    @override
    def build(self, entries: Sequence[Entry], exchange: Callable[[], FusedExchange]) -> None:
        exchange()
        with tf.init_scope():
            if not self._optimizer.built:
                self._plain.build(self._optimizer, [entry.variable for entry in entries])
            self._stored.build(entries)

    @override
    def step_eagerly(self, exchange: FusedExchange, entries: Sequence[Entry], result: ExchangeResult) -> None:
        self._step(tf.constant(result.present))

    @override
    def exchange_outputs(self, exchange: FusedExchange, entries: Sequence[Entry]) -> ExchangeOutputs:
        """See `InnerStep.exchange_outputs`: who has a gradient."""
        specs = [tf.TensorSpec([len(self._stored.variables)], tf.bool)]
        return ExchangeOutputs(specs, lambda result: [np.array(result.present, bool)])

    @override
    def step_in_graph(
        self, exchange: FusedExchange, entries: Sequence[Entry], outputs: Sequence[tf.Tensor]
    ) -> Sequence[tf.Tensor]:
        self._step(outputs[0])
        return []

    def _step(self, present: tf.Tensor) -> None:
        self._stored.push_and_fetch(present)
        self._optimizer.iterations.assign_add(1)

    @override
    def divide_again(self, exchange: Callable[[], FusedExchange]) -> None:
        """See `InnerStep.divide_again`: nothing is divided, but it is loaded next."""
        self._stored.expect_other_values()

    @override
    def kept_state(self, models: Mapping[str, Any]) -> KeepsState | None:
        self._stored.bring_state()
        return None

    @override
    def finalize(self, variables: Sequence[Any]) -> None:
        """Do nothing: stores have no moving averages."""


class DifferenceStep(WholeStep):
    """Lets the optimizer step by this worker's gradients, and pushes the difference.

    Args:
        options: of the strategy.
        optimizer: the bound optimizer, whose state is this worker's.
        plain: its class before it was bound.
        update: the framework-free side.
    """

    check_rows: RowCheck | None = None

    def __init__(self, options: WorkerOptions, optimizer: Any, plain: type[Any], update: Update) -> None:
        super().__init__(optimizer, plain, lambda variable: variable_and_slots(optimizer, variable))
        self._update = update
        self._stored = VariablesInStore(options, optimizer, plain, update)
        self.before: Any = None
        self.pull, self.settle, self.bring = self._stored.pull, self._stored.settle, self._stored.bring
        self.is_of, self.close, self.before_commit = self._stored.is_of, self._stored.close, self._stored.bring_state

    @property
    @override
    def keeps_parameters(self) -> bool:
        return False

    @property
    @override
    def is_built(self) -> bool:
        return self._stored.is_built

    @property
    def is_filled(self) -> bool:
        """See `StoreStep.is_filled`."""
        return self._stored.is_filled

    @override
    def own_gradient(self, variable: Any, gradient: Gradient | None) -> Gradient | None:
        if self.check_rows is not None and isinstance(gradient, tf.IndexedSlices):
            self.check_rows(variable)
        return super().own_gradient(variable, gradient)

    @override
    def build(self, entries: Sequence[Entry], exchange: Callable[[], FusedExchange]) -> None:
        exchange()
        with tf.init_scope():
            if not self._optimizer.built:
                super().build(entries, exchange)
            self._stored.build(entries)

    @override
    def step_eagerly(self, exchange: FusedExchange, entries: Sequence[Entry], result: ExchangeResult) -> None:
        super().step_eagerly(exchange, entries, result)
        self._push()

    @override
    def step_in_graph(
        self, exchange: FusedExchange, entries: Sequence[Entry], outputs: Sequence[tf.Tensor]
    ) -> Sequence[tf.Tensor]:
        kept = super().step_in_graph(exchange, entries, outputs)
        self._push()
        return kept

    def _push(self) -> None:
        self._stored.push_and_fetch(tf.ones([len(self._stored.variables)], tf.bool))

    @override
    def kept_state(self, models: Mapping[str, Any]) -> KeepsState | None:
        return _StateOfOne(self._optimizer, models, is_writer=self._update.communicator.rank == 0)


class _StateOfOne(OptimizerState):
    """The optimizer's state in a checkpoint: that of rank 0, since each worker has one."""

    def __init__(self, optimizer: Any, models: Mapping[str, Any], *, is_writer: bool) -> None:
        super().__init__(optimizer, models)
        self._is_writer = is_writer

    @override
    def pieces(self) -> Sequence[Piece]:
        return super().pieces() if self._is_writer else []


def _count(variable: Any) -> int:
    return int(np.prod(tuple(variable.shape), dtype=np.int64))


def _equal(target: Array, value: Array) -> bool:
    return np.array_equal(target, value) or np.array_equal(target, value, equal_nan=True)
