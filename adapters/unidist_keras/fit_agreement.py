"""Keeps `fit` the same on all ranks: callbacks see means over the ranks, all ranks stop together, values are compared.

EarlyStopping, ReduceLROnPlateau and ModelCheckpoint decide by the logs of an epoch, which are of this rank's samples.
A rank that stops alone leaves the others waiting, and one that lowers its learning rate alone goes its own way.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from unidist.errors import DeadlockError, UsageError
from unidist.negotiation import allgather_object
from unidist.runtime import context
from unidist.waits import calling
from unidist_keras.shared_files import let_one_rank_write

if TYPE_CHECKING:
    from unidist.verification import ReplicaCheck

__all__ = ["agree_in_fit", "hyperparameters"]

_UNEVEN_BATCHES = (
    "If the ranks have different numbers of batches, give fit as many on each: data of ud.shard, or steps_per_epoch"
)

_log = logging.getLogger("unidist")


def agree_in_fit(
    model: Any,
    optimizer: Any,
    check: ReplicaCheck | None,
    *,
    is_whole: bool,
    bring_up_to_date: Callable[[], object] = lambda: None,
) -> None:
    """Let `fit` of a distributed model average the logs of epochs, stop on all ranks together, and compare values.

    Files that callbacks of several ranks would write are written by rank 0.

    Args:
        model: all ranks call its `fit` with the same options.
        optimizer: the bound one, with which it is to be compiled.
        check: of its values, which does not follow the updates; None: nothing is compared.
        is_whole: each rank has all of the model and of the optimizer's state.
        bring_up_to_date: called before values are read: the variables get the values of the last step.
    """
    plain = model.fit

    @functools.wraps(plain)
    def fit(*args: Any, **options: Any) -> Any:
        bound = inspect.signature(plain).bind(*args, **options)
        given = bound.arguments.get("callbacks")
        own = given.callbacks if isinstance(given, keras.callbacks.CallbackList) else given or []
        own = list(own) if isinstance(own, list | tuple) else [own]
        if is_whole:
            own = let_one_rank_write(own)
        before, after = _MeanLogs(optimizer), _Agreement(optimizer, check, bring_up_to_date)
        if isinstance(given, keras.callbacks.CallbackList):
            for each in (before, after):
                each.set_model(model)
                each.set_params(given.params)
            given.callbacks[:] = [before, *own, after]
        else:
            bound.arguments["callbacks"] = [before, *own, after]
        try:
            return plain(*bound.args, **bound.kwargs)
        except DeadlockError as error:
            error.add_note(_UNEVEN_BATCHES)
            raise

    model.fit = fit


def hyperparameters(optimizer: Any) -> Mapping[str, bytes]:
    """Return digests of what a script may change of an optimizer, by name."""
    rate = np.asarray(optimizer.learning_rate, np.float64)
    return {"the learning rate": hashlib.blake2b(rate.tobytes(), digest_size=8).digest()}


class _MeanLogs(keras.callbacks.Callback):
    """Comes first: callbacks and the history see the mean of each number over the ranks that have it."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self._optimizer = optimizer

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the logs in place. Collective."""
        updates = self._optimizer._unidist.distributed_update.step
        own = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
        with calling(f"the end of epoch {epoch + 1} of fit, after {updates} updates"):
            everyone = allgather_object(context.current().operations(), own, name="unidist.fit.logs")
        for name in own:
            found = [theirs[name] for theirs in everyone if name in theirs]
            if any(value != found[0] for value in found[1:]):
                assert logs is not None
                logs[name] = sum(found) / len(found)


class _Agreement(keras.callbacks.Callback):
    """Comes last: what callbacks have decided is that of all ranks, and what ranks share is compared."""

    def __init__(self, optimizer: Any, check: ReplicaCheck | None, bring_up_to_date: Callable[[], object]) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._check = check
        self._bring_up_to_date = bring_up_to_date
        self._num_steps = 0
        self._num_alone: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Note how often an optimizer that is not bound has been applied."""
        del logs
        other = self.model.optimizer
        is_bound = other is None or getattr(other, "_unidist", None) is self._optimizer._unidist
        self._num_alone = None if is_bound else int(np.asarray(other.iterations))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Compare after the first updates. Collective.

        Before the next batch, since Keras waits for the numbers of each step if a callback wants its end.

        Raises:
            UsageError: the model trains with an optimizer that is not distributed.
        """
        del batch, logs
        if self._num_steps:
            self._check_optimizer()
            if self._check is not None and self._check.is_due(self._num_steps):
                self._bring_up_to_date()
                self._check.compare(f"after step {self._num_steps} of fit")
        self._num_steps += 1

    def _check_optimizer(self) -> None:
        if self._num_alone is None:
            return
        self._bring_up_to_date()
        if int(np.asarray(self.model.optimizer.iterations)) > self._num_alone:
            raise UsageError(
                f"fit trains with a {type(self.model.optimizer).__name__} that is not distributed, so each rank goes "
                "its own way: compile the model with the optimizer that distribute() has returned"
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compare, and stop if a rank stops. Collective."""
        del logs
        self._check_optimizer()
        if self._check is not None:
            self._bring_up_to_date()
            self._check.compare(f"at the end of epoch {epoch + 1} of fit")
        stops = bool(self.model.stop_training)
        everyone = allgather_object(context.current().operations(), stops, name="unidist.fit.stop")
        if any(everyone) and not stops:
            _log.info("fit ends after epoch %d: rank %d stops", epoch + 1, everyone.index(True))
            self.model.stop_training = True
