"""Binds an update to a Keras optimizer on JAX: it stays the same object, and its steps go through unidist first."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from unidist.elastic.state import HostsUpdatedInterrupt
from unidist.optim.update import Update
from unidist_jax.compiled import translated
from unidist_jax.keras.binding import Binding, raise_failure
from unidist_jax.optimizer.cell import release_abandoned
from unidist_keras import mixin
from unidist_keras.elastic_fit import LostAtBeginningError


class DistributedOptimizerMixin(mixin.DistributedOptimizerMixin):
    """Methods that `bind` adds to an optimizer. Never instantiated by itself."""

    _unidist: Binding

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Exchange the gradients, then return what Keras makes of them. Collective; `fit` calls it in its step.

        Within a window of accumulate=N it returns the old values, the number of iterations among them.

        Args:
            optimizer_variables: values of `variables`.
            grads: this rank's, one for each variable that the optimizer was built for.
            trainable_variables: values of those variables.

        Returns:
            The new values of the trainable variables and of the optimizer's.
        """
        if not self._unidist.inner.is_built:
            raise ValueError("the optimizer is not built: call optimizer.build(model.trainable_variables) first")
        return self._unidist.stateless_apply(optimizer_variables, grads, trainable_variables)

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss as gradients are taken of it; Keras' train step calls it."""
        scaled = super().scale_loss(loss)  # type: ignore[misc]  # of an optimizer
        return self._unidist.weighted(scaled)

    @property
    def variables(self) -> list[Any]:
        """The optimizer's own variables. `fit` asks for them between epochs, so it ends there if a step has failed."""
        raise_failure()
        found: list[Any] = super().variables  # type: ignore[misc]  # of an optimizer
        return found

    def finalize_variable_values(self, var_list: Any) -> None:
        """Give variables their moving averages, if the optimizer keeps them; `fit` calls it at its end.

        Not where `fit` is left for a change of the ranks of an elastic job, and goes on afterwards.

        Raises:
            UnidistError: a step has failed.
        """
        if isinstance(sys.exc_info()[1], HostsUpdatedInterrupt | LostAtBeginningError):
            return
        raise_failure(wait=True)
        with translated():  # averages of a step that has failed, where its error was raised before
            super().finalize_variable_values(var_list)


def bind(optimizer: Any, update: Update, *, names: Mapping[str, Any] | None = None) -> Any:
    """Bind `update` to a Keras 3 optimizer; see `unidist.optim.BindsOptimizers`. Keras names its variables itself."""
    del names
    mixin.check_plain(optimizer)
    release_abandoned()
    plain = type(optimizer)
    optimizer.__class__ = mixin.bound_class(plain, DistributedOptimizerMixin)
    optimizer.__dict__["_unidist"] = Binding(optimizer, plain, update)
    return optimizer
