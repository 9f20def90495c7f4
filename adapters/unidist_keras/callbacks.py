"""Horovod's callbacks, without the class `Callback`: adapters mix them into those of the Keras that they bind.

class MetricAverageCallback(callbacks.AveragesMetrics, keras.callbacks.Callback): ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from unidist.elastic.state import State
from unidist.horovod_api.reduce_ops import Op
from unidist.negotiation.process_sets import global_process_set
from unidist.runtime import context
from unidist_arrays.memory import Array
from unidist_arrays.operations import prepare_allreduce

if TYPE_CHECKING:
    Callback: Any = object  # what these classes are mixed into
else:
    Callback = object

__all__ = [
    "AveragesMetrics", "CommitsState", "KeepsBatch", "KeepsEpoch", "RaisesLearningRate", "SavesBestModel",
    "SchedulesLearningRate",
]  # fmt: skip


class AveragesMetrics(Callback):
    """Averages an epoch's metrics over the ranks, for the callbacks after it in the list, and the history.

    Also those of `evaluate`, in what `on_test_end` hands to the callbacks after it. Every rank has the same metrics.

    Args:
        device: for Horovod's sake: metrics are averaged on the host.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average `logs` in place. Collective."""
        self._average(logs)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Average `logs` in place. Collective."""
        self._average(logs)

    def _average(self, logs: dict[str, Any] | None) -> None:
        names = sorted(logs or {})
        if logs and context.current().topology.world_size > 1:
            means = self._means([np.array(logs[name], np.float64) for name in names], "metric_average")
            for name, mean in zip(names, means, strict=True):
                logs[name] = float(mean)

    def _means(self, values: Sequence[Array], name: str) -> Sequence[Any]:
        """Return the means of `()` float64 values over the ranks. Collective."""
        return prepare_allreduce(
            values, name, op=Op.Average, prescale=1.0, postscale=1.0, process_set=global_process_set
        ).wait()


class SchedulesLearningRate(Callback):
    """Sets the learning rate to `initial_lr * multiplier` from epoch `start_epoch` to before `end_epoch`.

    Args:
        initial_lr: learning rate at the start of training.
        multiplier: of an epoch; or a constant, for `multiplier ** (epoch - start_epoch)`.
        start_epoch: first epoch in which it is set.
        end_epoch: first epoch in which it is not set any more; None for never.
        staircase: set it once per epoch, with the number of the epoch; else before each batch, with a fraction added.
        momentum_correction: where the rate changes, scale what an optimizer with momentum has accumulated along (Goyal
            et al. 2017, "Accurate, Large Minibatch SGD", section 2.3). Horovod scales the factor of momentum for one
            batch, which amounts to the same (except for Nesterov's second use of it) and is a constant in Keras 3.
        steps_per_epoch: default: as `fit` says.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.multiplier: Callable[[float], float] = (
            multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        )

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out the steps of an epoch."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"{type(self).__name__} cannot find out the number of steps per epoch; pass steps_per_epoch"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate if it is due."""
        after = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or after:
            return
        if self.staircase:
            if batch == 0:
                self._set(self.current_epoch)
        else:
            assert self.steps_per_epoch is not None
            self._set(self.current_epoch + batch / self.steps_per_epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the learning rate as "lr"."""
        if logs is not None:
            logs["lr"] = _learning_rate(self.model.optimizer)

    def _set(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        before, rate = _learning_rate(optimizer), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = rate
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if self.momentum_correction and getattr(inner, "momentum", None) and before and rate != before:
            for momentum in self._momentums(inner):
                momentum.assign(momentum * (rate / before))

    def _momentums(self, optimizer: Any) -> Sequence[Any]:
        """Return the variables of the momentum that an optimizer has accumulated; none if it is not built yet."""
        return list(getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", []))


def _learning_rate(optimizer: Any) -> float:
    rate = optimizer.learning_rate
    return float(rate.numpy() if hasattr(rate, "numpy") else rate)


class RaisesLearningRate(SchedulesLearningRate):
    """Raises the learning rate from `initial_lr / size` to `initial_lr` over the first epochs, batch by batch.

    P. Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", https://arxiv.org/abs/1706.02677:
    at `epoch` (a fraction of it included) it is `initial_lr / size * (epoch * (size - 1) / warmup_epochs + 1)`.

    Args:
        initial_lr: learning rate after the warm-up.
        warmup_epochs: epochs that it takes.
        momentum_correction: see `SchedulesLearningRate`.
        steps_per_epoch: default: as `fit` says.
        verbose: 1 prints on rank 0 when it is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            size = context.current().topology.world_size
            assert self.steps_per_epoch is not None
            epoch += 1.0 / self.steps_per_epoch  # round numbers at the end of each epoch
            return (epoch * (size - 1) / warmup_epochs + 1) / size

        super().__init__(initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the learning rate; say when the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        over = self.end_epoch is not None and epoch == self.end_epoch - 1
        if over and self.verbose > 0 and context.current().topology.rank == 0:
            rate = _learning_rate(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class SavesBestModel(Callback):
    """Saves the best model. Without a path, as in Horovod, it must be given one before training: `filepath`.

    Goes in front of Keras' ModelCheckpoint.

    Args:
        filepath: where; ends in `.keras`, with `save_weights_only` in `.weights.h5`.
        monitor: see Keras' ModelCheckpoint, as all further arguments.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        *,
        filepath: str | None = None,
    ) -> None:
        suffix = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath=f"unset{suffix}" if filepath is None else filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = filepath

    def on_train_begin(self, logs: Any = None) -> None:
        """Check that a path was given."""
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint has no path: set its filepath before fit")
        super().on_train_begin(logs)


class CommitsState(Callback):
    """Commits a state every few batches, and at the end of each epoch.

    Args:
        state: to commit.
        batches_per_commit: batches between two commits.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Start counting, at the same batch on every rank."""
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit if it is due."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        self.commit()

    def commit(self) -> None:
        """Commit now; a derived class may do more."""
        self.state.commit()


class KeepsBatch(Callback):
    """Keeps the number of the batch in `state.batch`; 0 at the end of an epoch.

    Args:
        state: has an attribute `batch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Reset the number of steps of an epoch."""
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Shorten the first epoch after a reset by the batches that were processed."""
        if self.params.get("steps"):
            if self.steps_per_epoch is None:
                self.steps_per_epoch = self.params["steps"]
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Begin with batch 0 again."""
        self.state.batch = 0


class KeepsEpoch(Callback):
    """Keeps the number of epochs that were completed, over resets, in `state.epoch`.

    Args:
        state: has an attribute `epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Count from the epoch of the state."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Count an epoch."""
        self.state.epoch = self.initial_epoch + epoch + 1
