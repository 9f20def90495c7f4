"""Parameters between two updates, for those that act on them: `Update.actors`.

Variables have no memory that could be written to. Where graphs run, a branch of the graph reads them, a node of the
host changes copies, and the branch assigns the results: TensorFlow orders it among the reads and writes of each one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from typing_extensions import override

from unidist.buffer import Buffer
from unidist.optim.actors import Actors, TrainedState, check_keeps_parameters
from unidist.optim.update import Update
from unidist_arrays.memory import Array, array_of_buffer, buffer_of_array
from unidist_arrays.trained_arrays import TrainedArrays, copies_of
from unidist_keras.slots import slot_lists
from unidist_tensorflow.gradients.tensors import AddedOperations, HostFunction, host_node
from unidist_tensorflow.optimizer.inner_step import InnerStep

_FLAG = tf.TensorSpec([], tf.bool)
_NAME = "unidist_actions_on_parameters_which_need_jit_compile_False"

Result = TypeVar("Result")


class KerasTrainedState(TrainedState):
    """Parameters and state of an optimizer outside of graphs, as copies.

    Args:
        optimizer: the bound optimizer.
        variables: returns those whose gradients are exchanged, by place.
    """

    def __init__(self, optimizer: Any, variables: Callable[[], Sequence[Any]]) -> None:
        self._optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        self._variables = variables

    @override
    def values(self) -> Sequence[Buffer]:
        return [_value(variable) for variable in self._variables()]

    @override
    def store(self, values: Sequence[Buffer]) -> None:
        _assign(self._variables()[: len(values)], values)

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
            for name, kept in slot_lists(self._optimizer).items()
            for number, variable in enumerate(kept)
            if variable is not None and tf.as_dtype(variable.dtype).is_floating
        }


class ActingStep:
    """Lets those that act on parameters act around the inner steps of one optimizer, eagerly or in a graph.

    Args:
        update: the framework-free side.
        keeper: keeps the functions of nodes alive.
    """

    def __init__(self, update: Update, keeper: list[HostFunction]) -> None:
        self._update = update
        self._keeper = keeper

    def around(self, variables: Sequence[Any], inner: InnerStep, step: Callable[[], Result]) -> Result:
        """Make the inner step, or add it to the graph that is being built, between what belongs before and after it.

        Args:
            variables: by place in the exchange.
            inner: the inner step.
            step: calls it.

        Raises:
            UsageError: it does not step on the variables of the model.
        """
        if self._update.actors is None:
            return step()
        check_keeps_parameters(inner, self._actors.names)
        [is_wanted] = self._node(self._wanted_before, [], [_FLAG])
        tf.cond(is_wanted, lambda: self._act_before(variables), lambda: False)
        added = AddedOperations()
        result = step()
        with tf.control_dependencies(added.stateful()):
            [is_wanted] = self._node(self._wanted_after, [], [_FLAG])
        tf.cond(is_wanted, lambda: self._act_after(variables), lambda: False)
        return result

    @property
    def _actors(self) -> Actors:
        assert self._update.actors is not None, "there were some when the step was made"
        return self._update.actors

    def _node(self, function: HostFunction, inputs: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]) -> Any:
        return host_node(function, inputs, specs, name=_NAME, keeper=self._keeper)

    def _wanted_before(self) -> list[Array]:
        return [np.asarray(self._actors.wanted_before(self._update.step + 1))]

    def _act_before(self, variables: Sequence[Any]) -> bool:
        def act(*arrays: Any) -> list[Array]:
            self._actors.act_before(self._update.step + 1, TrainedArrays(copies_of(arrays)))
            return [np.asarray(True)]

        self._node(act, [tf.convert_to_tensor(each) for each in variables], [_FLAG])
        return True

    def _wanted_after(self) -> list[Array]:
        return [np.asarray(self._actors.wanted_after(self._update.step + 1))]

    def _act_after(self, variables: Sequence[Any]) -> bool:
        def act(*arrays: Any) -> list[Array]:
            results = copies_of(arrays)
            self._actors.act_after(self._update.step + 1, TrainedArrays(results))
            return results

        specs = [tf.TensorSpec(each.shape, each.dtype) for each in variables]
        results = self._node(act, [tf.convert_to_tensor(each) for each in variables], specs)
        for variable, value in zip(variables, results, strict=True):
            variable.assign(value)
        return True


def _value(variable: Any) -> Buffer:
    with tf.init_scope():
        return buffer_of_array(copies_of([tf.convert_to_tensor(variable)])[0])


def _assign(variables: Sequence[Any], values: Sequence[Buffer]) -> None:
    with tf.init_scope():
        for variable, value in zip(variables, values, strict=True):
            variable.assign(array_of_buffer(value, tuple(variable.shape)))
