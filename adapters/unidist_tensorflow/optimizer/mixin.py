"""Binds an update to a Keras optimizer: it stays the same object, and its `apply` goes through unidist first."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import keras

from unidist.errors import UsageError
from unidist.mixins import with_mixin
from unidist.optim.update import Update
from unidist.waits import calling
from unidist_tensorflow.optimizer.binding import Binding


class BoundMixin:
    """Methods of every bound optimizer, of Keras 3 or tf_keras. Never instantiated by itself."""

    _unidist: Binding
    _unidist_plain: type[Any]

    @calling("optimizer.flush()")
    def flush(self) -> bool:
        """Apply a window of accumulate=N that the end of an epoch cut short; the mean is over its actual passes.

        Every rank calls it, outside of `tf.function`, also one whose window is empty.

        Returns:
            Whether there was anything to apply on any rank.
        """
        return self._unidist.flush()

    def register_local_var(self, var: Any) -> None:
        """Leave a variable out of the exchange: every rank updates it by its own gradient. Before the first update."""
        self._unidist.register_local(var)

    @property
    def backward_passes_per_step(self) -> int:
        """Calls of `apply` (tf_keras: `apply_gradients`) that make one update."""
        return self._unidist.passes

    @classmethod
    def from_config(cls, config: dict[str, Any], **options: Any) -> Any:
        """Return a plain optimizer: the binding to a job is in no configuration."""
        return cls._unidist_plain.from_config(config, **options)


def bound_class(plain: type[Any], mixin: type[BoundMixin]) -> type[Any]:
    """Return the class of a bound optimizer. Its plain class is what is saved: it loads anywhere."""
    return with_mixin(plain, mixin, _unidist_plain=plain)


class DistributedOptimizerMixin(BoundMixin):
    """Methods that `bind` adds to an optimizer of Keras 3. Never instantiated by itself."""

    def build(self, var_list: Any) -> None:
        """Make the optimizer's own variables; Keras calls it before the first update."""
        if not self._unidist.inner.is_built:
            self._unidist.build(var_list)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Give variables their moving averages, if the optimizer keeps them; `fit` calls it at its end."""
        self._unidist.inner.finalize(var_list)

    @calling("optimizer.save_own_variables()")
    def save_own_variables(self, store: Any) -> None:
        """Save nothing if this rank has a shard only: the file would be incomplete. Keras calls it."""
        if not self._unidist.inner.sharded:
            super().save_own_variables(store)  # type: ignore[misc]  # of an optimizer
            return
        warnings.warn(
            "the optimizer's state is sharded over the ranks and is not in this file; unidist's save keeps it",
            stacklevel=2,
        )

    @calling("optimizer.load_own_variables()")
    def load_own_variables(self, store: Any) -> None:
        """Refuse if this rank has a shard only. Keras calls it."""
        if self._unidist.inner.sharded and len(store.keys()):
            raise UsageError(
                "the optimizer's state is sharded over the ranks: a file with all of it cannot be loaded into it. Load "
                "it before distribute(), or use unidist's load"
            )
        super().load_own_variables(store)  # type: ignore[misc]  # of an optimizer

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss to take gradients of: `fit` calls it, and custom training loops must."""
        loss = self._unidist.weighted(loss)
        scaled = self._unidist.scale_loss(loss)
        return super().scale_loss(loss) if scaled is None else scaled  # type: ignore[misc]  # of an optimizer

    @calling("optimizer.apply()")
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Exchange the gradients, then let Keras clip, unscale, look for overflows and update. Collective.

        Inside a window of accumulate=N nothing is sent and nothing changes, `iterations` included: it counts updates.

        Args:
            grads: one for each variable; None where there is none. Ranks may differ in that: what any rank has a
                gradient for is updated on all, what none has is left alone.
            trainable_variables: default: those that the optimizer was built for.
        """
        self._unidist.apply(grads, trainable_variables)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to be put into a LossScaleOptimizer, which resets the static loss scale of the optimizer in it."""
        if name == "loss_scale_factor" and value is None and "_unidist" in self.__dict__:
            raise UsageError(
                "a LossScaleOptimizer was put around a distributed optimizer: it would look for infinities before the "
                "exchange, and only one rank would skip the step. model.compile() does so under mixed_float16. Put it "
                "inside: DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)), or use "
                "distribute(model, optimizer), which does it for you"
            )
        super().__setattr__(name, value)


def bind(optimizer: Any, update: Update, *, names: Mapping[str, Any] | None = None) -> Any:
    """Bind `update` to a Keras 3 optimizer; see `unidist.optim.BindsOptimizers`. Keras names its variables itself."""
    check_plain(optimizer)
    plain = type(optimizer)
    optimizer.__class__ = bound_class(plain, DistributedOptimizerMixin)
    optimizer.__dict__["_unidist"] = Binding(optimizer, plain, update)
    return optimizer


def check_plain(optimizer: Any) -> None:
    """Raise UsageError unless this is an optimizer of Keras 3 that is not bound."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__} is no optimizer of Keras 3. With one of "
            "tf_keras (TF_USE_LEGACY_KERAS=1) or TF1 use DistributedOptimizer"
        )
    if isinstance(optimizer, DistributedOptimizerMixin):
        raise UsageError("this optimizer is distributed already; call distribute() or DistributedOptimizer() once")
    inner = getattr(optimizer, "inner_optimizer", None)
    if isinstance(inner, DistributedOptimizerMixin):
        raise UsageError("the optimizer inside of this one is distributed already; distribute the outer one only")


def scales_loss(optimizer: Any) -> bool:
    """Say whether the optimizer scales the loss by itself."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
