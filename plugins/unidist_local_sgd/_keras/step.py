"""Local SGD for Keras 3: the optimizer's own step, and a synchronization after the updates that need one.

Variables have no memory that could be written to. A synchronization reads them, exchanges copies in a node of the host,
and assigns the results; where graphs run, both are in a branch of the graph, which TensorFlow orders among the reads
and writes of each variable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from typing_extensions import override

from unidist.buffer import Buffer
from unidist.optim import MakesInnerStep, Update
from unidist_arrays.fused_exchange import ExchangeResult, FusedExchange
from unidist_arrays.memory import Array, array_of_buffer, buffer_of_array, empty_array
from unidist_local_sgd.binding import LocalSGDBinding, TrainedState
from unidist_local_sgd.schedule import Due
from unidist_local_sgd.strategy import LocalSGD
from unidist_local_sgd.synchronization import Synchronizer
from unidist_tensorflow.framework import TensorFlowFramework
from unidist_tensorflow.gradients.tensors import AddedOperations, HostFunction, host_node
from unidist_tensorflow.optimizer import Entry, InnerStep, WholeStep, slot_lists, variable_and_slots

_FLAG = tf.TensorSpec([], tf.bool)
_NAME = "unidist_synchronization_of_parameters_which_needs_jit_compile_False"

Result = TypeVar("Result")


class KerasLocalSGD(LocalSGDBinding):
    """See `LocalSGDBinding`."""

    @override
    def inner_step(self, strategy: LocalSGD) -> MakesInnerStep:
        def make(optimizer: Any, plain: type[Any], update: Update) -> InnerStep:
            update.options = replace(update.options, sparse_as_dense=True)  # sparse gradients would be exchanged
            return LocalStep(optimizer, plain, update, strategy)

        return make


class LocalStep(WholeStep):
    """Steps with this rank's own gradients.

    Args:
        optimizer: the bound optimizer.
        plain: its class before it was bound.
        update: the framework-free side.
        strategy: its options.
    """

    def __init__(self, optimizer: Any, plain: type[Any], update: Update, strategy: LocalSGD) -> None:
        super().__init__(optimizer, plain, lambda variable: variable_and_slots(optimizer, variable))
        self._update = update
        self._trained = KerasState(optimizer)
        self._synchronizer = Synchronizer(strategy, update, TensorFlowFramework(), self._trained, optimizer)
        self._due = Due((), ())
        self._host_functions: list[HostFunction] = []

    @override
    def step_eagerly(self, exchange: FusedExchange, entries: Sequence[Entry], result: ExchangeResult) -> None:
        self._with_synchronization(entries, lambda: super(LocalStep, self).step_eagerly(exchange, entries, result))

    @override
    def step_in_graph(
        self, exchange: FusedExchange, entries: Sequence[Entry], outputs: Sequence[tf.Tensor]
    ) -> Sequence[tf.Tensor]:
        return self._with_synchronization(
            entries, lambda: super(LocalStep, self).step_in_graph(exchange, entries, outputs)
        )

    @override
    def finalize(self, variables: Sequence[Any]) -> None:
        """See `InnerStep.finalize`: moving averages are each rank's own, and become the variables."""
        super().finalize(variables)
        if getattr(self._trained.optimizer, "use_ema", False):
            self._synchronizer.average()

    def _with_synchronization(self, entries: Sequence[Entry], step: Callable[[], Result]) -> Result:
        """Make the step, eagerly or in the graph that is being built, between what belongs before and after it."""
        places = {entry.place: entry.variable for entry in entries if entry.place is not None}
        variables = self._trained.variables = [places[place] for place in sorted(places)]
        [needs_start] = self._node(self._check_start, [], [_FLAG])
        tf.cond(needs_start, lambda: self._keep_start(variables), lambda: False)
        added = AddedOperations()
        result = step()
        with tf.control_dependencies(added.stateful()):
            [is_due] = self._node(self._advance, [], [_FLAG])
        tf.cond(is_due, lambda: self._synchronize(variables), lambda: False)
        return result

    def _node(self, function: HostFunction, inputs: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]) -> Any:
        return host_node(function, inputs, specs, name=_NAME, keeper=self._host_functions)

    def _check_start(self) -> list[Array]:
        if self._synchronizer.needs_begin:
            self._synchronizer.begin(self._update.parameters)
        return [np.asarray(self._synchronizer.needs_start)]

    def _keep_start(self, variables: Sequence[Any]) -> bool:
        def keep(*arrays: Any) -> list[Array]:
            self._synchronizer.keep_start([buffer_of_array(array) for array in _copies(arrays)])
            return [np.asarray(True)]

        self._node(keep, [tf.convert_to_tensor(each) for each in variables], [_FLAG])
        return True

    def _advance(self) -> list[Array]:
        self._due = self._synchronizer.advance(self._update.step + 1)
        return [np.asarray(bool(self._due))]

    def _synchronize(self, variables: Sequence[Any]) -> bool:
        def run(*arrays: Any) -> list[Array]:
            results = _copies(arrays)
            self._synchronizer.run(self._due, [buffer_of_array(each) for each in results])
            return results

        specs = [tf.TensorSpec(each.shape, each.dtype) for each in variables]
        results = self._node(run, [tf.convert_to_tensor(each) for each in variables], specs)
        for variable, value in zip(variables, results, strict=True):
            variable.assign(value)
        return True


class KerasState(TrainedState):
    """Parameters and state of an optimizer, as copies.

    Args:
        optimizer: the bound optimizer.

    Attributes:
        variables: whose gradients are exchanged, by place.
        optimizer: the one that has the slots.
    """

    def __init__(self, optimizer: Any) -> None:
        self.variables: list[Any] = []
        self.optimizer = getattr(optimizer, "inner_optimizer", optimizer)

    @override
    def values(self) -> Sequence[Buffer]:
        return [_value(variable) for variable in self.variables]

    @override
    def store(self, values: Sequence[Buffer]) -> None:
        _assign(self.variables, values)

    @override
    def slots(self) -> Mapping[str, Buffer]:
        return {name: _value(variable) for name, variable in self._slots().items()}

    @override
    def store_slots(self, slots: Mapping[str, Buffer]) -> None:
        found = self._slots()
        _assign([found[name] for name in slots], list(slots.values()))

    def _slots(self) -> dict[str, Any]:
        return {
            f"{number}.{name}": variable
            for name, kept in slot_lists(self.optimizer).items()
            for number, variable in enumerate(kept)
            if variable is not None and tf.as_dtype(variable.dtype).is_floating
        }


def _copies(arrays: Sequence[Any]) -> list[Array]:
    """Return copies that can be written to: what graphs give and take belongs to TensorFlow."""
    found = []
    for array in map(np.asarray, arrays):
        copy = empty_array(array.shape, array.dtype)
        np.copyto(copy, array)
        found.append(copy)
    return found


def _value(variable: Any) -> Buffer:
    with tf.init_scope():
        return buffer_of_array(_copies([tf.convert_to_tensor(variable)])[0])


def _assign(variables: Sequence[Any], values: Sequence[Buffer]) -> None:
    with tf.init_scope():
        for variable, value in zip(variables, values, strict=True):
            variable.assign(array_of_buffer(value, tuple(variable.shape)))
