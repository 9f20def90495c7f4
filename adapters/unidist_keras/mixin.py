"""Methods of Keras optimizers that are bound: they stay the same objects, and their `apply` goes through unidist first.

An adapter derives from the mixin for its backend. What it binds is in the attribute `_unidist` (`OptimizerBinding`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import keras

from unidist.errors import UsageError
from unidist.mixins import with_mixin
from unidist.waits import calling

if TYPE_CHECKING:
    from unidist.optim import Update

__all__ = [
    "BoundMixin", "DistributedOptimizerMixin", "OptimizerBinding", "bound_class", "check_plain", "scales_loss",
]  # fmt: skip


class BoundStep(Protocol):
    """Requirements of the mixin on the step from reduced gradients to new variables."""

    @property
    def sharded(self) -> bool:
        """Whether this rank keeps the optimizer state of its shard of the variables only."""

    @property
    def is_built(self) -> bool:
        """Whether `build` has nothing left to do."""

    def finalize(self, variables: Sequence[Any]) -> None:
        """Do what Keras asks for at the end of training: give variables their moving averages, say. Collective."""


class OptimizerBinding(Protocol):
    """The state of one bound optimizer, as far as its methods use it. Each adapter has a class of this kind."""

    inner: Any
    """A `BoundStep`."""

    distributed_update: Update
    """Its framework-free side."""

    @property
    def passes(self) -> int:
        """Passes that make one update."""

    def build(self, variables: Sequence[Any]) -> None:
        """Build the optimizer for these variables of the model. Collective if its state is sharded."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Exchange the gradients, and update the variables. Collective."""

    def flush(self) -> bool:
        """Apply a window that was cut short; returns whether there was anything to apply. Collective."""

    def register_local(self, variable: Any) -> None:
        """Leave a variable out of the exchange; before the first update, the same ones on every rank."""


class BoundMixin:
    """Methods of every bound optimizer, of Keras 3 or tf_keras. Never instantiated by itself."""

    _unidist: OptimizerBinding
    _unidist_plain: type[Any]

    @calling("optimizer.flush()")
    def flush(self) -> bool:
        """Apply a window of accumulate=N that the end of an epoch cut short; the mean is over its actual passes.

        Every rank calls it, outside of compiled functions, also one whose window is empty.

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
    """Methods of every bound optimizer of Keras 3. Never instantiated by itself."""

    def build(self, var_list: Any) -> None:
        """Make the optimizer's own variables; Keras calls it before the first update."""
        if not self._unidist.inner.is_built:
            self._unidist.build(var_list)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Give variables their moving averages, if the optimizer keeps them; `fit` calls it at its end."""
        self._unidist.inner.finalize(var_list)
        update = self._unidist.distributed_update
        if update.actors is not None and getattr(getattr(self, "inner_optimizer", self), "use_ema", False):
            update.actors.act_at_end(update.trained)

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
    """Return whether the optimizer scales the loss by itself."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
