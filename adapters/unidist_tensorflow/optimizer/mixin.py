"""Binds an update to a Keras optimizer: it stays the same object, and its `apply` goes through unidist first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unidist.optim.update import Update
from unidist_keras import mixin
from unidist_tensorflow.optimizer.acting import KerasTrainedState
from unidist_tensorflow.optimizer.binding import Binding
from unidist_tensorflow.optimizer.gathered_step import CutVariable


class DistributedOptimizerMixin(mixin.DistributedOptimizerMixin):
    """Methods that `bind` adds to an optimizer of Keras 3. Never instantiated by itself."""

    _unidist: Binding

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss to take gradients of: `fit` calls it, and custom training loops must."""
        loss = self._unidist.weighted(loss)
        scaled = self._unidist.scale_loss(loss)
        return super().scale_loss(loss) if scaled is None else scaled  # type: ignore[misc]  # of an optimizer


def bind(
    optimizer: Any, update: Update, *, names: Mapping[str, Any] | None = None, gathered: Sequence[CutVariable] = ()
) -> Any:
    """Bind `update` to a Keras 3 optimizer; see `unidist.optim.BindsOptimizers`. Keras names its variables itself.

    Collective if variables are to be `gathered`: those that are cut, if the optimizer looks at whole ones.
    """
    mixin.check_plain(optimizer)
    plain = type(optimizer)
    optimizer.__class__ = mixin.bound_class(plain, DistributedOptimizerMixin)
    binding = Binding(optimizer, plain, update, gathered)
    optimizer.__dict__["_unidist"] = binding
    update.trained = KerasTrainedState(optimizer, lambda: binding.variables)
    return optimizer
