"""The inner step of a bound optimizer: from the reduced gradients to the new variables.

The usual one, `WholeStep`, gives the optimizer's own class every gradient as a whole. A strategy with the capability
`BringsInnerStep` brings another one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from typing_extensions import override

from unidist.checkpoint.format.interface import STATE_ATTRIBUTE, KeepsState
from unidist.gradients.buckets import ParameterInfo
from unidist.gradients.precision import Precision
from unidist_arrays.fused_exchange import ExchangeResult, FusedExchange
from unidist_tensorflow.gradients.tensors import ExchangeOutputs, Gradient, gradients_of, tensor_of, whole_gradients
from unidist_tensorflow.memory import dtype_of
from unidist_tensorflow.optimizer.narrow_update import update_by


@dataclass(frozen=True)
class Entry:
    """One variable of a call of `apply`.

    Args:
        variable: of the model.
        gradient: this rank's own, or None.
        place: of the variable in the exchange; None for a local one, whose gradient is used as it is.
    """

    variable: Any
    gradient: Gradient | None
    place: int | None


class InnerStep(ABC):
    """The inner step of one bound optimizer. Every rank of the data axis calls its methods in the same order.

    Attributes:
        sharded: it takes this rank's shard of the gradients (`Update.reduced`), not whole ones. Those that
            `own_gradient` returned sparse are zeros there, and all of their rows in `FusedExchange.gathered`.
    """

    sharded = False

    _optimizer: Any

    @property
    def keeps_parameters(self) -> bool:
        """Whether it steps on the model's own parameters, all of which this rank has between two updates.

        Then others may change them there (`Update.actors`). Not where it has copies (master weights), or parts.
        """
        return False

    @property
    def shards_state(self) -> bool:
        """Whether a rank has its shard of the optimizer's state alone; else each can give all of it. As `sharded`."""
        return self.sharded

    @property
    @abstractmethod
    def is_built(self) -> bool:
        """Whether `build` has nothing left to do."""

    def prepare(self, variables: Sequence[Any]) -> None:  # noqa: B027 - most have nothing to choose
        """Choose options of the exchange. Called before it is made, on every rank; perhaps within a trace.

        Args:
            variables: of the model, whose gradients are exchanged.
        """

    def held(self, variable: Any) -> ParameterInfo:
        """Return the part of a variable that this rank holds, and has gradients of. Default: all of it."""
        name = str(getattr(variable, "path", variable.name))
        return ParameterInfo(name, tuple(variable.shape), dtype_of(variable))

    def own_gradient(self, variable: Any, gradient: Gradient | None) -> Gradient | None:
        """Return this rank's gradient of a variable in the type of its part; None if there is none.

        A sharded step makes it dense if its rows may be added up.
        """
        return gradient if gradient is None else as_gradient(gradient, variable)

    def equal_everywhere(self, model: Any) -> list[Any]:
        """Return the variables of a model and its optimizer that must be equal on every rank."""
        return [*model.weights, *self._optimizer.variables]

    @abstractmethod
    def build(self, entries: Sequence[Entry], exchange: Callable[[], FusedExchange]) -> None:
        """Build the optimizer for these variables of the model, local ones included, before its first step.

        Args:
            entries: all variables that the optimizer is for, without gradients.
            exchange: gives the exchange, prepared; collective when first called. Variables are equal on every rank
                from then on, where the script wants that.
        """

    @abstractmethod
    def step_eagerly(self, exchange: FusedExchange, entries: Sequence[Entry], result: ExchangeResult) -> None:
        """Update the variables by what an exchange has reduced."""

    @abstractmethod
    def exchange_outputs(self, exchange: FusedExchange, entries: Sequence[Entry]) -> ExchangeOutputs:
        """Return the outputs of the exchange that `step_in_graph` needs."""

    @abstractmethod
    def step_in_graph(
        self, exchange: FusedExchange, entries: Sequence[Entry], outputs: Sequence[tf.Tensor]
    ) -> Sequence[tf.Tensor]:
        """Add the update of the variables to the graph that is being built.

        Args:
            exchange: as `exchange_outputs` had it.
            entries: as `exchange_outputs` had them.
            outputs: tensors of the arrays that it asked for.

        Returns:
            Tensors over memory of the exchange, which must live until the update is done.
        """

    def divide_again(self, exchange: Callable[[], FusedExchange]) -> None:  # noqa: B027 - whole state stays as it is
        """Divide sharded state again, for the present ranks, if they have changed. Collective.

        The optimizer is built. Its slots of the shards have arbitrary values afterwards: they are loaded next.

        Args:
            exchange: see `build`.
        """

    def kept_state(self, models: Mapping[str, Any]) -> KeepsState | None:
        """Return the optimizer's state for a checkpoint; None if every rank has it whole: the adapter saves that.

        Args:
            models: whose variables the optimizer updates, by prefix of their paths.
        """
        return None

    @abstractmethod
    def finalize(self, variables: Sequence[Any]) -> None:
        """Do what Keras asks for at the end of training: give variables their moving averages, say. Collective."""


class WholeStep(InnerStep):
    """Every rank steps with all gradients.

    Args:
        optimizer: the bound optimizer.
        plain: its class before it was bound, or what has its `apply`.
        variable_and_slots: returns a variable and what the optimizer keeps for it.
        precision: of the run.
    """

    def __init__(
        self,
        optimizer: Any,
        plain: Any,
        variable_and_slots: Callable[[Any], Sequence[Any]],
        precision: Precision | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._plain = plain
        self._variable_and_slots = variable_and_slots
        self._apply = update_by(optimizer, plain, precision)

    @property
    @override
    def keeps_parameters(self) -> bool:
        return True

    @property
    @override
    def is_built(self) -> bool:
        return bool(self._optimizer.built)

    @override
    def build(self, entries: Sequence[Entry], exchange: Callable[[], FusedExchange]) -> None:
        self._plain.build(self._optimizer, [entry.variable for entry in entries])

    @override
    def step_eagerly(self, exchange: FusedExchange, entries: Sequence[Entry], result: ExchangeResult) -> None:
        reduced = []
        for entry in entries:
            sparse = isinstance(entry.gradient, tf.IndexedSlices)
            reduced.append(
                entry.gradient if entry.place is None else tensor_of(exchange, result, entry.place, sparse=sparse)
            )
        self.apply(reduced, [entry.variable for entry in entries])

    @override
    def exchange_outputs(self, exchange: FusedExchange, entries: Sequence[Entry]) -> ExchangeOutputs:
        return whole_gradients(exchange.variables, *_wanted(entries))

    @override
    def step_in_graph(
        self, exchange: FusedExchange, entries: Sequence[Entry], outputs: Sequence[tf.Tensor]
    ) -> Sequence[tf.Tensor]:
        wanted, sparse = _wanted(entries)
        by_place = dict(zip(wanted, gradients_of(outputs, exchange.variables, wanted, sparse), strict=True))
        kept: list[tuple[tf.Tensor, Any, tf.Tensor]] = []
        reduced = []
        for entry in entries:
            reduced.append(entry.gradient if entry.place is None else by_place[entry.place])
            if entry.place is not None and entry.gradient is None:
                # Whether another rank has a gradient is known when the graph runs: it is updated by zeros if none
                # has, and then made what it was.
                is_present = outputs[0][wanted.index(entry.place)]
                kept += [(is_present, each, tf.identity(each)) for each in self._variable_and_slots(entry.variable)]

        def restore() -> None:
            for is_present, each, before in kept:
                each.assign(tf.where(is_present, tf.convert_to_tensor(each), before))

        with restoring(self._optimizer, restore):
            self.apply(reduced, [entry.variable for entry in entries])
        return [gradient for gradient in by_place.values() if not isinstance(gradient, tf.IndexedSlices)]

    def apply(self, gradients: Sequence[Gradient | None], variables: Sequence[Any]) -> None:
        """Let the optimizer update variables of the model by gradients that need no exchange, or have had it."""
        self._apply(gradients, variables, {})

    @override
    def finalize(self, variables: Sequence[Any]) -> None:
        self._plain.finalize_variable_values(self._optimizer, variables)


def has_sharded_state(optimizer: Any) -> bool:
    """Return whether an optimizer is bound and its state is sharded."""
    bound = getattr(optimizer, "__dict__", {}).get(STATE_ATTRIBUTE)
    return bound is not None and bool(bound.inner.shards_state)


def as_gradient(gradient: Any, variable: Any) -> Gradient:
    """Return a gradient in the type of its variable."""
    dtype = tf.as_dtype(variable.dtype)
    return gradient if gradient.dtype == dtype else tf.cast(gradient, dtype)


@contextmanager
def restoring(optimizer: Any, restore: Callable[[], None]) -> Iterator[None]:
    """Call `restore` after the update of variables within the block, but before their moving averages are taken.

    Args:
        optimizer: whose `apply` is called.
        restore: gives variables their values from before.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    name = "_update_model_variables_moving_average"
    if not getattr(optimizer, "use_ema", False):
        yield
        restore()
        return
    plain = getattr(optimizer, name)

    def restore_first(*args: Any, **kwargs: Any) -> Any:
        restore()
        return plain(*args, **kwargs)

    optimizer.__dict__[name] = restore_first
    try:
        yield
    finally:
        del optimizer.__dict__[name]


def _wanted(entries: Sequence[Entry]) -> tuple[list[int], set[int]]:
    """Return the places of the entries, and which of them have sparse gradients on this rank."""
    wanted = [entry.place for entry in entries if entry.place is not None]
    return wanted, {
        entry.place for entry in entries if entry.place is not None and isinstance(entry.gradient, tf.IndexedSlices)
    }


def is_of_keras(optimizer: Any, plain: type[Any], variables: Sequence[Any]) -> bool:
    """Return whether the optimizer is one of Keras' own, of which none keeps a gradient beyond its step."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        return plain.__module__.startswith("keras.") and is_of_keras(inner, type(inner), variables)
    overwrites = any(getattr(variable, "overwrite_with_gradient", False) for variable in variables)
    return plain.__module__.startswith("keras.") and not overwrites
