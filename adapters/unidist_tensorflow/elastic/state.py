"""Elastic state for TensorFlow and Keras, by Horovod's names: variables as values of a state."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf
from typing_extensions import override

from unidist.checkpoint.format.interface import STATE_ATTRIBUTE, kept_state
from unidist.elastic import run as run_elastic
from unidist.elastic.durable.parts import DurableParts, parts_of
from unidist.elastic.handlers import divided_handlers, update_handlers
from unidist.elastic.state import Handler, HostsUpdatedInterrupt, ObjectState, SharedHandler, State
from unidist.elastic.step_training import Policy
from unidist.errors import PeerLostError
from unidist.optim.update import update_of
from unidist.runtime import context
from unidist_tensorflow.checkpoint.states import KerasStates
from unidist_tensorflow.elastic.divided import SeedsHandler
from unidist_tensorflow.memory import DTYPES, Array, array_of
from unidist_tensorflow.operations.functions import broadcast_variables
from unidist_tensorflow.operations.graph import take_failure
from unidist_tensorflow.optimizer.inner_step import has_sharded_state

__all__ = [
    "HostsUpdatedInterrupt", "ObjectState", "Policy", "State", "TensorFlowKerasState", "TensorFlowState", "run",
]  # fmt: skip

Result = TypeVar("Result")


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap a training function `func(state, ...)`: its state is synchronised before it starts.

    See `unidist.elastic.state.run`. An operation in a graph that lost a peer ends its run with an error of
    TensorFlow's, which is recognised here.
    """

    @functools.wraps(func)
    def raising(state: State, *args: Any, **kwargs: Any) -> Result:
        with raising_peer_losses():
            return func(state, *args, **kwargs)

    return run_elastic(raising)


@contextmanager
def raising_peer_losses() -> Iterator[None]:
    """Raise PeerLostError if a graph has lost a peer, of which TensorFlow passes on only the text."""
    take_failure()
    try:
        yield
    except tf.errors.OpError as exc:
        failure = take_failure()
        if isinstance(failure, PeerLostError) and not isinstance(exc, PeerLostError):
            raise failure from exc
        raise


class _Variables(Handler):
    """Keeps a list of variables.

    Args:
        value: returns them; a list that may grow, as an optimizer's does.
        session: of the TF1 graph they are in; None in eager mode.
        keeps_previous: a commit may fail after `save`, so do not write into the copy of the commit before.
    """

    def __init__(
        self, value: Callable[[], Sequence[Any]], session: Any = None, *, keeps_previous: bool = False
    ) -> None:
        self._session = session
        self._keeps_previous = keeps_previous
        # In a graph, before it is final: each run of the operation uses the same names.
        self._broadcast = None if session is None else broadcast_variables(value(), root_rank=0)
        self._saved: list[Array] = []
        self._previous: list[Array] = []
        super().__init__(value)

    def save(self) -> None:
        variables = self.value()
        if self._session is not None:
            self._saved = self._session.run(list(variables))
        else:
            memory = self._previous if self._keeps_previous else self._saved
            tensors = map(tf.convert_to_tensor, variables)
            copies = [
                _copied(tensor, into) for tensor, into in itertools.zip_longest(tensors, memory[: len(variables)])
            ]
            self._saved, self._previous = copies, self._saved if self._keeps_previous else []

    def restore(self) -> None:
        for variable, value in zip(self.value(), self._saved, strict=False):  # those that came later stay
            if self._session is not None:
                variable.load(value, self._session)
            else:
                variable.assign(value)

    def sync(self) -> None:
        if self._session is not None:
            self._session.run(self._broadcast)
        else:
            broadcast_variables(self.value(), root_rank=0)


def _copied(tensor: tf.Tensor, memory: Array | None) -> Array:
    """Return a copy of a tensor's values, in the memory of an earlier copy if it fits."""
    if tensor.dtype not in DTYPES:  # a table, say
        return np.array(tensor.numpy())
    values = array_of(tensor)
    if memory is None or memory.shape != values.shape or memory.dtype != values.dtype:
        return values.copy()
    np.copyto(memory, values)
    return memory


class TensorFlowState(ObjectState):
    """State of a list of variables: `TensorFlowState(variables, epoch=0)`.

    Args:
        variables: default: the global variables of the TF1 graph.
        session: of a TF1 graph; default: the default session.
        values: further attributes.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **values: Any) -> None:
        self.variables = list(variables or tf.compat.v1.global_variables())
        if not tf.executing_eagerly():
            session = session or tf.compat.v1.get_default_session()
            if session is None:
                raise ValueError("TensorFlowState in a graph needs a session: pass it, or call it within one")
        self.session = session
        super().__init__(handlers={"all_variables": _Variables(lambda: self.variables, session)}, **values)


class TensorFlowKerasState(ObjectState):
    """State of a Keras model and its optimizer: `TensorFlowKerasState(model, optimizer, epoch=0)`.

    Args:
        model: built.
        optimizer: default: the one that the model was compiled with.
        backend: for Horovod's sake: Keras 3 has no sessions that it could give.
        values: further attributes.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **values: Any) -> None:
        if not getattr(model, "built", True):
            raise ValueError("the model has no variables yet; call model.build(input_shape) first")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        self.backend = backend
        runtime = context.current() if context.is_initialized() else None
        self._is_divided = runtime is not None and runtime.is_elastic and runtime.plan.divides_model
        self._is_sharded = not self._is_divided and has_sharded_state(self.optimizer)
        # The handler of the optimizer of a divided model has its update, too.
        handlers = update_handlers({"optimizer": None if self._is_divided else update_of(self.optimizer)})
        if self._is_divided:
            handlers |= divided_handlers(KerasStates(), model, self.optimizer, is_sharded=has_sharded_state)
            handlers["seeds"] = SeedsHandler(model)
        elif self._is_sharded:
            handlers["optimizer"] = SharedHandler.of_optimizer(
                KerasStates(),
                self.optimizer,
                model,
                has_model=lambda: kept_state(model) is not None,  # else every rank has all of it
            )
        else:
            self._build_optimizer()
        if not self._is_divided:
            handlers["all_variables"] = _Variables(self._variables, keeps_previous=self._is_sharded)
        super().__init__(handlers=handlers, **values)

    @override
    def sync(self) -> None:
        super().sync()
        if self._is_divided:
            seeds = self._handlers["seeds"]
            assert isinstance(seeds, SeedsHandler)
            seeds.share(context.current(), has_values=self.has_values)

    def _build_optimizer(self) -> None:
        """Build it in an elastic job: a rank that joins later needs the variables that the others send it."""
        is_elastic = context.is_initialized() and context.current().membership is not None
        if is_elastic and self.optimizer is not None and not getattr(self.optimizer, "built", True):
            self.optimizer.build(self.model.trainable_variables)

    def _variables(self) -> list[Any]:
        """Return the variables that every rank has whole."""
        if self._is_sharded:
            equal = self.optimizer.__dict__[STATE_ATTRIBUTE].inner.equal_everywhere(self.model)
            divided = {id(each) for each in self.model.weights} - {id(each) for each in equal}
            return [each for each in self.model.variables if id(each) not in divided]
        own = [] if self.optimizer is None else self.optimizer.variables
        return [*self.model.variables, *(own() if callable(own) else own)]

    @override
    def durable_parts(self) -> DurableParts:
        states = KerasStates()
        if self.optimizer is not None:
            states.prepare_to_load(self.optimizer)
        optimizers = {} if self.optimizer is None else {"optimizer": self.optimizer}
        return parts_of(states, {"model": self.model}, optimizers, {}, self._plain_sections())
