"""Elastic state of Keras models on JAX, and callbacks that maintain it, by Horovod's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
from typing_extensions import override

from unidist.elastic.durable.parts import DurableParts, parts_of
from unidist.elastic.handlers import update_handlers
from unidist.elastic.state import Handler, ObjectState
from unidist.elastic.step_training import Policy
from unidist.optim.update import update_of
from unidist.runtime import context
from unidist_arrays.memory import Array
from unidist_jax.elastic import run
from unidist_jax.keras.binding import broadcast_variables
from unidist_jax.keras.checkpoint import KerasStates, attach_state
from unidist_jax.memory import array_of
from unidist_keras import callbacks

__all__ = ["CommitStateCallback", "KerasState", "Policy", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]


class _Variables(Handler):
    """Keeps variables in host memory: the next step is given their arrays.

    Args:
        value: returns them; a list that may grow, as an optimizer's does.
    """

    def __init__(self, value: Callable[[], Sequence[Any]]) -> None:
        self._kept: list[Array] = []
        super().__init__(value)

    def save(self) -> None:
        arrays = [array_of(variable.value) for variable in self.value()]
        before: list[Array | None] = [*self._kept, *[None] * len(arrays)]
        self._kept = [_copied(array, kept) for array, kept in zip(arrays, before, strict=False)]

    def restore(self) -> None:
        for variable, kept in zip(self.value(), self._kept, strict=False):  # those that came later stay
            variable.assign(jnp.array(kept, copy=True))

    def sync(self) -> None:
        broadcast_variables(self.value(), root_rank=0)


def _copied(array: Array, kept: Array | None) -> Array:
    """Return a copy of an array, in the memory of the previous commit if it fits."""
    if kept is None or kept.shape != array.shape or kept.dtype != array.dtype:
        return np.array(array)
    np.copyto(kept, array)
    return kept


class KerasState(ObjectState):
    """State of a Keras model and its optimizer: `KerasState(model, epoch=0, batch=0)`.

    Weights, seeds of layers and the optimizer's variables. Metrics are each rank's own, and begin again with `fit`.
    Made on every rank, before the function that `run` wraps. It may be committed within `fit`, by a callback.

    Args:
        model: built.
        optimizer: default: the one that the model was compiled with.
        values: further attributes. They must be picklable.

    Raises:
        ValueError: the model is not built.
    """

    def __init__(self, model: Any, optimizer: Any = None, **values: Any) -> None:
        if not getattr(model, "built", True):
            raise ValueError("the model has no variables yet; call model.build(input_shape) first")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        self._build_optimizer()
        handlers = update_handlers({"optimizer": update_of(self.optimizer)})
        super().__init__(handlers={**handlers, "all_variables": _Variables(self._variables)}, **values)

    def _build_optimizer(self) -> None:
        """Build it in an elastic job: a rank that joins later needs the variables that the others send it."""
        is_elastic = context.is_initialized() and context.current().membership is not None
        if is_elastic and self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(self.model.trainable_variables)

    def _variables(self) -> list[Any]:
        metrics = {id(each) for each in self.model.metrics_variables}
        own = [] if self.optimizer is None else self.optimizer.variables
        return [*(each for each in self.model.variables if id(each) not in metrics), *own]

    @override
    def save(self) -> None:
        attach_state([self.model])
        super().save()

    @override
    def restore(self) -> None:
        self.model._jax_state = None  # of a step that has failed
        super().restore()

    @override
    def durable_parts(self) -> DurableParts:
        optimizers = {} if self.optimizer is None else {"optimizer": self.optimizer}
        return parts_of(KerasStates(), {"model": self.model}, optimizers, {}, self._plain_sections())


class CommitStateCallback(callbacks.CommitsState, keras.callbacks.Callback):
    """Commits a state every few batches, and at the end of each epoch: see `callbacks.CommitsState`."""


class UpdateBatchStateCallback(callbacks.KeepsBatch, keras.callbacks.Callback):
    """Keeps the number of the batch in `state.batch`; 0 at the end of an epoch: see `callbacks.KeepsBatch`."""


class UpdateEpochStateCallback(callbacks.KeepsEpoch, keras.callbacks.Callback):
    """Keeps the number of epochs that were completed, over resets, in `state.epoch`: see `callbacks.KeepsEpoch`."""
