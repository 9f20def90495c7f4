"""ZeRO for Keras 3 in an elastic job: in each generation shards have other sizes, and graphs stay the same.

A graph that was traced for one number of ranks runs with others: a script's `tf.function` cannot be traced again from
outside. So nothing in the graph depends on that number. The inner step is one node, within which everything runs in
eager mode: values of the model's variables go in, new ones come out. At stage 3 graphs see fragments through windows,
see `Fragment`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from unidist.errors import UsageError
from unidist.gradients.interface import GradientExchange
from unidist.runtime import context
from unidist_arrays.fused_exchange import ExchangeResult, FusedExchange
from unidist_tensorflow.gradients.tensors import AddedOperations, ExchangeOutputs, host_node
from unidist_tensorflow.memory import Array, array_of, tensor_of_array
from unidist_tensorflow.optimizer.inner_step import Entry
from unidist_zero._keras.fragments.variables import Fragment
from unidist_zero._keras.optimizer_rebuild import restore_variables, single_variables, unbuild
from unidist_zero._keras.stage3_step import FragmentStep
from unidist_zero._keras.step import ShardedStep

NODE = "unidist_update_of_shards_which_needs_jit_compile_False"


class ElasticStep(ShardedStep):
    """See the module's text, and `ShardedStep` for the arguments."""

    _divided: GradientExchange | None = None
    """Whose partition the shards are of."""

    @override
    def build(self, entries: Sequence[Entry], exchange: Callable[[], FusedExchange]) -> None:
        super().build(entries, exchange)
        self._divided = self._update.exchanges[0]

    @override
    def divide_again(self, exchange: Callable[[], FusedExchange]) -> None:
        self._divide_model()
        exchange()
        if self._update.exchanges[0] is self._divided:
            return
        owners = list({id(each): each for each in (self._inner, self._optimizer)}.values())
        with tf.init_scope():
            kept = [(owner, unbuild(owner)) for owner in owners]
            self._shards = []
            self._shards = self._make_shards()
            self._exclude_from_decay()
            self._plain.build(self._optimizer, [*(shard.variable for shard in self._shards), self._nothing])
            for owner, singles in kept:
                restore_variables(owner, singles)
        if self.in_files is not None:
            self.in_files.resized()
        self._optimizer.built = True
        self._divided = self._update.exchanges[0]

    @override
    def step_eagerly(self, exchange: FusedExchange, entries: Sequence[Entry], result: ExchangeResult) -> None:
        self._check_divided()
        super().step_eagerly(exchange, entries, result)

    @override
    def exchange_outputs(self, exchange: FusedExchange, entries: Sequence[Entry]) -> ExchangeOutputs:
        """See `InnerStep.exchange_outputs`: who has a gradient. The gradients stay in the memory of the exchange."""
        spec = tf.TensorSpec([len(self._variables)], tf.bool)
        return ExchangeOutputs([spec], lambda result: [np.array(result.present, bool)])

    @override
    def step_in_graph(
        self, exchange: FusedExchange, entries: Sequence[Entry], outputs: Sequence[tf.Tensor]
    ) -> Sequence[tf.Tensor]:
        given, echoes = self._given(), self._echoes()
        bare = [Entry(entry.variable, None, entry.place) for entry in entries]

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # TensorFlow has no types
        def run(present: Any, *values: Any) -> list[Array]:
            self._check_divided()
            stand_ins = [_StandIn(variable, value) for variable, value in zip(given, values, strict=True)]
            self._step_now(exchange, bare, np.asarray(present).tolist(), stand_ins)
            found = [tf.convert_to_tensor(each) for each in stand_ins]
            return [array_of(value) for value in (*found, *(echo.value() for echo in echoes))]

        targets = [*given, *(echo.variable for echo in echoes)]
        specs = [tf.TensorSpec(each.shape, each.dtype) for each in targets]
        # TensorFlow knows nothing of what the node does to the optimizer's own variables. As they are written before
        # and after it, what the graph reads of them is of before or after, too.
        added = AddedOperations()
        for echo in echoes:
            echo.variable.assign(tf.convert_to_tensor(echo.variable))
        with tf.control_dependencies(added.stateful()):
            values = [tf.convert_to_tensor(variable) for variable in given]
            found = host_node(run, [*outputs, *values], specs, name=NODE, keeper=self._host_functions)
        for each, value in zip(targets, found, strict=True):
            each.assign(value)
        return []

    @override
    def finalize(self, variables: Sequence[Any]) -> None:
        if self._is_built:
            self._check_divided()
        super().finalize(variables)

    def _divide_model(self) -> None:
        """Shard the model for the new ranks, if it is sharded. Collective."""

    def _given(self) -> Sequence[Any]:
        """Return the variables of the model that are inputs and outputs of the node."""
        return self._variables

    def _echoes(self) -> list[_Echo]:
        """Return other variables that the graph may read and the node changes."""
        return [_Echo(each, partial(tf.convert_to_tensor, each)) for each in single_variables(self._optimizer)]

    def _check_divided(self) -> None:
        if self._update.exchanges[0] is not self._divided:
            raise UsageError(
                "the ranks have changed, and the optimizer's state, of which each rank keeps a shard, was not taken "
                "along: give the optimizer to the elastic state on every rank, KerasState(model, optimizer), after "
                "distribute() and before the function that elastic.run calls"
            )


class ElasticFragmentStep(ElasticStep, FragmentStep):
    """The same at stage 3."""

    @override
    def step_eagerly(self, exchange: FusedExchange, entries: Sequence[Entry], result: ExchangeResult) -> None:
        super().step_eagerly(exchange, entries, result)
        for fragment in self.model.fragments:
            fragment.show()

    def _divide_model(self) -> None:
        self.model.divide_again(context.current())

    def _given(self) -> Sequence[Any]:
        return ()

    def _echoes(self) -> list[_Echo]:
        return [*super()._echoes(), *(_Echo(each.window, partial(_stored, each)) for each in self.model.fragments)]


@dataclass(frozen=True)
class _Echo:
    """A variable that a graph reads, and that the node changes without TensorFlow's knowledge.

    Args:
        variable: in the graph.
        value: returns its value after the node.
    """

    variable: Any
    value: Callable[[], tf.Tensor]


def _stored(fragment: Fragment) -> tf.Tensor:
    return tf.convert_to_tensor(fragment.storage.value)


class _StandIn:
    """Stands for a variable of the model within a node, where TensorFlow does not allow writing to variables.

    Args:
        variable: of the model.
        value: its value.
    """

    def __init__(self, variable: Any, value: Any) -> None:
        self.shape = variable.shape
        self.dtype = variable.dtype
        self.constraint = getattr(variable, "constraint", None) if isinstance(variable, keras.Variable) else None
        self._value = tensor_of_array(np.asarray(value))

    def assign(self, value: Any) -> None:
        """Set the value."""
        self._value = tf.convert_to_tensor(value)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        """Return the value."""
        return self._value
