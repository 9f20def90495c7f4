"""Keras callbacks by Horovod's names, for the Keras that `tf.keras` is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from unidist.runtime import context
from unidist_tensorflow.keras_api import IS_LEGACY, VARIABLES, api, build_legacy_optimizer, is_old
from unidist_tensorflow.operations.functions import broadcast_variables
from unidist_tensorflow.operations.reductions import Average, grouped_allreduce
from unidist_tensorflow.optimizer.inner_step import has_sharded_state


class BroadcastGlobalVariablesCallback(api.callbacks.Callback):
    """Gives every rank one rank's weights and optimizer state: before the first batch, or after it if built by it.

    `distribute` does this by itself; it is for `DistributedOptimizer`.

    Args:
        root_rank: whose they are.
        device: for Horovod's sake: variables travel from host memory.
        local_variables: one variable or several that stay as they are.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local: set[int] = set()
        if local_variables is not None:
            single = isinstance(local_variables, VARIABLES)
            for variable in [local_variables] if single else local_variables:
                self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Leave a variable as it is on each rank."""
        if not isinstance(var, VARIABLES):
            raise ValueError(f"local variables must be variables, not {type(var).__name__}")
        self._local.add(id(var))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Broadcast, if there is a built model and optimizer."""
        optimizer = self.model.optimizer
        if self.model.built and IS_LEGACY and not self.broadcast_done:
            build_legacy_optimizer(optimizer, self.model.trainable_variables)  # Keras 3's is built before
        if self.model.built and (IS_LEGACY or optimizer.built):
            self._broadcast()

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast, if that was not possible before the batch; by Horovod's name, for loops that call it."""
        self._broadcast()

    def _broadcast(self) -> None:
        if not self.broadcast_done:
            self.broadcast_done = True
            optimizer = self.model.optimizer
            if has_sharded_state(optimizer):
                variables = optimizer._unidist.inner.equal_everywhere(self.model)
            else:
                own = optimizer.variables
                variables = [*self.model.weights, *(own() if callable(own) else own)]
            broadcast_variables([each for each in variables if id(each) not in self._local], self.root_rank)


class MetricAverageCallback(api.callbacks.Callback):
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
        average_metrics(logs)

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Average `logs` in place. Collective."""
        average_metrics(logs)


def average_metrics(logs: dict[str, Any] | None) -> None:
    """Replace every number by its mean over the ranks. Collective; every rank has the same names."""
    names = sorted(logs or {})
    if logs and context.current().topology.world_size > 1:
        values = [tf.constant(np.float64(logs[name])) for name in names]
        for name, mean in zip(names, grouped_allreduce(values, op=Average, name="metric_average"), strict=True):
            logs[name] = float(mean)


class LearningRateScheduleCallback(api.callbacks.Callback):
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
            for momentum in _momentums(inner, self.model):
                momentum.assign(momentum * (rate / before))


def _learning_rate(optimizer: Any) -> float:
    return float(tf.convert_to_tensor(optimizer.learning_rate).numpy())


def _momentums(optimizer: Any, model: Any) -> list[Any]:
    """Return the momentum that an optimizer has accumulated; none if it is not built yet."""
    if IS_LEGACY and is_old(optimizer):
        built = "momentum" in optimizer.get_slot_names()
        return [optimizer.get_slot(each, "momentum") for each in model.trainable_variables] if built else []
    return list(getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", []))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr` over the first epochs, batch by batch.

    P. Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", https://arxiv.org/abs/1706.02677:
    at `epoch` (a fraction of it included) it is `initial_lr / size * (epoch * (size - 1) / warmup_epochs + 1)`.

    Args:
        initial_lr: learning rate after the warm-up.
        warmup_epochs: epochs that it takes.
        momentum_correction: see `LearningRateScheduleCallback`.
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


class BestModelCheckpoint(api.callbacks.ModelCheckpoint):
    """Saves the best model. Without a path, as in Horovod, it must be given one before training: `filepath`.

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


__all__: Sequence[str] = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
