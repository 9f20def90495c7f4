"""The state of one bound Keras optimizer: gradients out of the graph, through the exchange, and back to Keras.

`apply` adds three nodes to a graph: the exchange of all gradients, what Keras itself makes of the reduced ones, and
one that says that the update is done. The last one has a second purpose: it takes the reduced gradients as inputs, so
that TensorFlow, which reuses the memory of tensors that nobody else waits for, never makes a variable of engine memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from unidist.buckets import ParameterInfo
from unidist.errors import ConfigurationError, UsageError
from unidist.update import Update
from unidist_tensorflow.errors import as_op_errors
from unidist_tensorflow.functions import broadcast_variables
from unidist_tensorflow.memory import Array, dtype_of
from unidist_tensorflow.training_arguments import with_groups
from unidist_tensorflow.training_exchange import FusedExchange, Result
from unidist_tensorflow.training_tensors import Gradient, exchange_eagerly, exchange_in_graph, tensor_of


class Binding:
    """The state of one bound optimizer.

    Args:
        optimizer: the optimizer, already of its new class.
        plain: its class before.
        update: the framework-free side.

    Attributes:
        scale_local: gradients of local variables are divided by the number of ranks, as those that are averaged.
        groups: lists of variables whose gradients travel together, or None; until the first update.
    """

    def __init__(self, optimizer: Any, plain: type[Any], update: Update) -> None:
        self.scale_local = True
        self.groups: Sequence[Sequence[Any]] | None = None
        self._optimizer = optimizer
        self._plain = plain
        self._update = update
        self._exchange: FusedExchange | None = None
        self._places: dict[Any, int] = {}  # of exchanged variables by key
        self._variables: list[Any] = []  # the exchanged ones
        self._local: set[Any] = set()
        self._initial: Callable[[], Sequence[Any]] | None = None
        self._started = False

    def register_local(self, variable: Any) -> None:
        """Leave a variable out of the exchange; before the first update, alike on every rank."""
        if self._exchange is not None:
            raise UsageError("register_local_var() belongs before the first update: the exchange is set up already")
        self._local.add(self._key(variable))

    def broadcast_when_built(self, variables: Callable[[], Sequence[Any]]) -> None:
        """Give every rank rank 0's variables as soon as they exist; `settle` or the first `apply` does it."""
        self._initial = variables

    def settle(self) -> None:
        """Do what was put off by `broadcast_when_built`. Collective, the first time."""
        if self._initial is not None:
            initial, self._initial = self._initial, None
            with tf.init_scope():  # at once, also while a function is being traced: before its first run
                broadcast_variables(initial(), root_rank=0)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """See `DistributedOptimizerMixin.apply`."""
        gradients = list(grads)
        if not gradients:
            return
        check_place()
        variables = self._build(trainable_variables)
        self.settle()
        self._started = True
        if self._update.num_ranks == 1 and self._update.accumulation.passes == 1:
            self._plain.apply(self._optimizer, gradients, variables)
            self._count([])
            return
        self._set_up()
        if len(gradients) != len(variables):
            raise UsageError(f"{len(gradients)} gradients for {len(variables)} variables: give one for each, or None")
        variables, gradients = self._complete(variables, gradients)
        if tf.executing_eagerly():
            self._apply_eagerly(variables, gradients)
        else:
            self._apply_in_graph(variables, gradients)

    def flush(self) -> bool:
        """See `DistributedOptimizerMixin.flush`."""
        if not tf.executing_eagerly():
            raise UsageError("flush() belongs outside of tf.function: it says whether there was anything to apply")
        if self._update.accumulation.passes == 1 or not self._started:
            return False
        self._set_up()
        assert self._exchange is not None
        with as_op_errors():
            result = self._exchange.flush()
        if result is None:
            return False
        self._step_eagerly(self._variables, [None] * len(self._variables), result)
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
        if not optimizer.built:
            if variables is None:
                raise ValueError("the optimizer is not built: give the variables along with the gradients")
            variables = list(variables)
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(variables)
            optimizer.built = True
        return list(optimizer._trainable_variables if variables is None else variables)

    def _set_up(self) -> None:
        if self._exchange is not None:
            return
        self._variables = [v for v in self._optimizer._trainable_variables if self._key(v) not in self._local]
        self._places = {self._key(variable): place for place, variable in enumerate(self._variables)}
        self._update.options = with_groups(self._update.options, self.groups, self._key, self._places)
        infos = [ParameterInfo(str(getattr(v, "path", v.name)), tuple(v.shape), dtype_of(v)) for v in self._variables]
        keeps_results = not _is_of_keras(self._optimizer, self._plain)
        gathers = not self._update.options.sparse_as_dense
        self._exchange = FusedExchange(self._update, infos, keeps_results=keeps_results, gathers=gathers)

    def _complete(self, variables: list[Any], gradients: list[Any]) -> tuple[list[Any], list[Any]]:
        """Add the variables that were not given: another rank may have a gradient for them."""
        given = {self._key(variable) for variable in variables}
        missing = [v for v in self._variables if v.trainable and self._key(v) not in given]
        unknown = given - self._places.keys() - self._local
        if unknown:
            names = [str(getattr(v, "path", v.name)) for v in variables if self._key(v) in unknown]
            raise ValueError(
                f"unknown variables {names}: the optimizer was built for others. Make a new optimizer for them"
            )
        return variables + missing, gradients + [None] * len(missing)

    def _own(self, variables: Sequence[Any], gradients: Sequence[Any]) -> dict[int, Gradient]:
        """Return the gradients that this rank has to exchange, by place."""
        own: dict[int, Gradient] = {}
        for variable, gradient in zip(variables, gradients, strict=True):
            place = self._places.get(self._key(variable))
            if gradient is not None and place is not None:
                own[place] = as_gradient(gradient, variable)
        return own

    def _scaled(self, gradient: Any) -> Any:
        """Return the gradient of a local variable as it is applied."""
        if gradient is None or not self.scale_local:
            return gradient
        size = self._update.num_ranks
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
        return gradient / size

    # Eager mode

    def _apply_eagerly(self, variables: list[Any], gradients: list[Any]) -> None:
        assert self._exchange is not None
        result = exchange_eagerly(self._exchange, self._own(variables, gradients))
        if result.complete:
            self._step_eagerly(variables, gradients, result)

    def _step_eagerly(self, variables: list[Any], gradients: list[Any], result: Result) -> None:
        assert self._exchange is not None
        reduced = []
        for variable, gradient in zip(variables, gradients, strict=True):
            place = self._places.get(self._key(variable))
            if place is None:
                reduced.append(self._scaled(gradient))
            else:
                sparse = isinstance(gradient, tf.IndexedSlices)
                reduced.append(tensor_of(self._exchange, result, place, sparse=sparse))
        self._plain.apply(self._optimizer, reduced, variables)
        self._update.applied()

    # Graphs

    def _apply_in_graph(self, variables: list[Any], gradients: list[Any]) -> None:
        assert self._exchange is not None
        wanted = [self._places[self._key(v)] for v in variables if self._key(v) in self._places]
        complete, present, reduced = exchange_in_graph(self._exchange, self._own(variables, gradients), wanted)
        if self._update.accumulation.passes == 1:
            self._step_in_graph(variables, gradients, wanted, present, reduced)
        else:
            tf.cond(
                complete, lambda: self._step_in_graph(variables, gradients, wanted, present, reduced), lambda: False
            )

    def _step_in_graph(
        self,
        variables: list[Any],
        gradients: list[Any],
        wanted: list[int],
        present: tf.Tensor,
        exchanged: list[Gradient],
    ) -> bool:
        by_place = dict(zip(wanted, exchanged, strict=True))
        kept: list[tuple[tf.Tensor, Any, tf.Tensor]] = []
        reduced = []
        for variable, gradient in zip(variables, gradients, strict=True):
            place = self._places.get(self._key(variable))
            reduced.append(self._scaled(gradient) if place is None else by_place[place])
            if place is not None and gradient is None:
                # Whether another rank has a gradient is known when the graph runs: it is updated by zeros if none
                # has, and then made what it was.
                is_present = present[wanted.index(place)]
                kept += [(is_present, each, tf.identity(each)) for each in self._belongings(variable)]
        current = tf.compat.v1.get_default_graph()
        first = len(current.get_operations())
        self._plain.apply(self._optimizer, reduced, variables)
        for is_present, each, before in kept:
            each.assign(tf.where(is_present, tf.convert_to_tensor(each), before))
        made = [operation for operation in current.get_operations()[first:] if operation.op_def.is_stateful]
        with tf.control_dependencies(made):
            self._count([gradient for gradient in exchanged if not isinstance(gradient, tf.IndexedSlices)])
        return True

    def _belongings(self, variable: Any) -> list[Any]:
        """Return the variable, and what the optimizer keeps for it: momentum and the like."""
        optimizer = getattr(self._optimizer, "inner_optimizer", self._optimizer)
        index = optimizer._get_variable_index(variable)
        count = len(optimizer._trainable_variables)
        own = {id(each) for each in optimizer.variables}
        lists = [kept for kept in vars(optimizer).values() if isinstance(kept, list) and len(kept) == count]
        return [variable, *(kept[index] for kept in lists if id(kept[index]) in own)]

    def _count(self, gradients: Sequence[tf.Tensor]) -> None:
        """Say that the update is done, after everything before; the gradients live until then."""
        if tf.executing_eagerly():
            self._update.applied()
            return

        def applied(*_: Array) -> Array:
            self._update.applied()
            return np.asarray(True)

        with tf.device("CPU:0"):
            tf.numpy_function(applied, gradients, tf.bool, name="unidist_end_of_update_which_needs_jit_compile_False")


def as_gradient(gradient: Any, variable: Any) -> Gradient:
    """Return a gradient in the type of its variable."""
    dtype = tf.as_dtype(variable.dtype)
    return gradient if gradient.dtype == dtype else tf.cast(gradient, dtype)


def check_place() -> None:
    """Raise where something else distributes training, or Keras does not run on TensorFlow.

    Raises:
        ConfigurationError: names it.
    """
    if keras.backend.backend() != "tensorflow":
        raise ConfigurationError(
            f"Keras runs on {keras.backend.backend()!r}, and this is unidist's TensorFlow adapter: set "
            "KERAS_BACKEND=tensorflow"
        )
    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise ConfigurationError(
            f"keras.distribution is active ({type(distribution).__name__}): on TensorFlow it distributes nothing, and "
            "unidist would be in its way. Leave keras.distribution.set_distribution out"
        )
    if tf.distribute.has_strategy():
        strategy = type(tf.distribute.get_strategy()).__name__
        raise ConfigurationError(f"tf.distribute's {strategy} is active: two things exchange gradients. Leave one out")


def _is_of_keras(optimizer: Any, plain: type[Any]) -> bool:
    """Say whether the optimizer is one of Keras' own, of which none keeps a gradient beyond its step."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        return plain.__module__.startswith("keras.") and _is_of_keras(inner, type(inner))
    overwrites = any(getattr(variable, "overwrite_with_gradient", False) for variable in optimizer._trainable_variables)
    return plain.__module__.startswith("keras.") and not overwrites
