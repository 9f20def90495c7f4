"""Binds an update to an optimizer of tf_keras (TF_USE_LEGACY_KERAS=1): `apply_gradients` goes through unidist first.

`binding` decides what is exchanged, and when; here are the calls in which tf_keras differs from Keras 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from unidist.errors import ConfigurationError, UsageError
from unidist.optim.update import Update
from unidist_keras.mixin import BoundMixin, bound_class
from unidist_tensorflow.keras_api import build_legacy_optimizer, is_old
from unidist_tensorflow.optimizer.binding import Binding
from unidist_tensorflow.optimizer.inner_step import InnerStep
from unidist_tensorflow.optimizer.pairs import PairReduction, Pairs


class LegacyOptimizerMixin(BoundMixin):
    """Methods that `bind_legacy` adds to an optimizer of tf_keras. Never instantiated by itself."""

    _unidist: LegacyBinding

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], name: str | None = None, **options: Any
    ) -> tf.Variable:
        """Exchange the gradients, then let tf_keras clip, look for overflows and update. Collective.

        Inside a window nothing is sent, and no weight changes. `iterations` counts updates with accumulate=N, and as
        Horovod's it counts every pass with `backward_passes_per_step`.

        Args:
            grads_and_vars: pairs; ranks may differ in which gradients are None.
            name: as for any optimizer.
            options: `skip_gradients_aggregation=True`, or `experimental_aggregate_gradients=False`: the gradients are
                reduced already, by a DistributedGradientTape say, and are applied as they are; not those that
                `compute_gradients` has left to be exchanged here.

        Returns:
            `iterations`.
        """
        pairs = list(grads_and_vars)
        reduced = options.get("skip_gradients_aggregation", False) or not options.get(
            "experimental_aggregate_gradients", True
        )
        computed = self._unidist.take_computed()
        if computed is not None:
            reduced, options = computed, {**options, **is_reduced(self)}
        if reduced:
            super().apply_gradients(pairs, name=name, **options)  # type: ignore[misc]  # of an optimizer
        elif pairs:
            self._unidist.apply_pairs(pairs, name)
        return self.iterations  # type: ignore[attr-defined]  # of an optimizer

    @property
    def _agg_helper(self) -> OpenWindow | None:
        """What scripts read of Horovod's optimizer: `_agg_helper.counter`, if an update takes several passes."""
        return OpenWindow(self._unidist.distributed_update) if self._unidist.passes > 1 else None

    def minimize(self, *args: Any, **kwargs: Any) -> Any:
        """Compute gradients, exchange and apply them, as `fit` does. Collective."""
        with self._unidist.minimizing():
            return super().minimize(*args, **kwargs)  # type: ignore[misc]  # of an optimizer

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """Return pairs of reduced gradient and variable, as Horovod's optimizer does. Collective.

        The next `apply_gradients` takes them as they are. With several passes per step, or with strategies that
        look at gradients, the gradients stay this rank's, and `apply_gradients` exchanges them.
        """
        return self._compute_gradients(loss, var_list, None, tape)

    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        tape = tf.GradientTape() if tape is None else tape
        plain: Any = super()
        if hasattr(plain, "_compute_gradients"):
            pairs = plain._compute_gradients(loss, var_list, grad_loss, tape=tape)
        else:
            pairs = plain.compute_gradients(loss, var_list, tape=tape)
        return list(self._unidist.reduce_now(list(pairs)))

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to be put into a LossScaleOptimizer, which would look for infinities before the exchange."""
        if name == "_is_wrapped_by_loss_scale_optimizer":
            raise UsageError(
                "a LossScaleOptimizer was put around a distributed optimizer: it would look for infinities before the "
                "exchange, and only one rank would skip the step. model.compile() does so under mixed_float16. Put it "
                "inside: DistributedOptimizer(tf.keras.mixed_precision.LossScaleOptimizer(optimizer))"
            )
        super().__setattr__(name, value)


class LegacyBinding(Binding):
    """The state of one bound optimizer of tf_keras.

    Args:
        optimizer: the optimizer, already of its new class.
        plain: its class before.
        update: the framework-free side.

    Attributes:
        reduction: of gradients that the script computes by the optimizer, for itself; None: there is none.
        counts_passes: `iterations` counts every pass: schedules and Adam's correction follow it as under Horovod.
    """

    def __init__(self, optimizer: Any, plain: type[Any], update: Update) -> None:
        self._apply_plainly = _PlainApply(plain)
        self.reduction: PairReduction | None = None
        self.counts_passes = False
        self._is_minimizing = False
        self._has_reduced: bool | None = None
        super().__init__(optimizer, self._apply_plainly, update)  # type: ignore[arg-type]  # has what it needs

    def apply_pairs(self, pairs: Sequence[tuple[Any, Any]], name: str | None) -> None:
        """Exchange and apply gradients, given as pairs of gradient and variable."""
        self._apply_plainly.name = name
        self.apply([gradient for gradient, _ in pairs], [variable for _, variable in pairs])

    @contextmanager
    def minimizing(self) -> Iterator[None]:
        """Leave the exchange to `apply_gradients` meanwhile."""
        self._is_minimizing = True
        try:
            yield
        finally:
            self._is_minimizing = False

    def reduce_now(self, pairs: Pairs) -> Pairs:
        """Return the pairs with reduced gradients, unless `apply_gradients` has to exchange them. Collective."""
        update = self._update
        exchanges_later = update.accumulation.passes > 1 or update.rules is not None or update.scaler is not None
        if self._is_minimizing:
            return pairs
        if self.reduction is None or exchanges_later:
            self._has_reduced = False
            return pairs
        self.reduction.local = self._local
        self._has_reduced = True
        return self.reduction.reduce(pairs)

    def take_computed(self) -> bool | None:
        """Return whether `reduce_now` has reduced the gradients to apply next; None: it has not seen them."""
        has_reduced, self._has_reduced = self._has_reduced, None
        return has_reduced

    def _pass_without_update(self) -> bool:
        if self.counts_passes:
            self._optimizer.iterations.assign_add(1)
        return False

    def _build(self, variables: Any) -> list[Any]:
        optimizer = self._optimizer
        if "_trainable_variables" not in optimizer.__dict__:
            build_legacy_optimizer(optimizer, list(variables), self._apply_plainly.name)
            # As Keras 3 calls them; an ordinary assignment would track them, and save them with the optimizer.
            optimizer.__dict__["_trainable_variables"] = list(variables)
        return list(variables)

    def _make_inner(self) -> InnerStep:
        if self._update.inner_steps is not None or self._update.actors is not None:
            raise ConfigurationError(
                "the strategy replaces the optimizer's update, which optimizers of tf_keras do not support; use one of "
                "Keras 3"
            )
        return super()._make_inner()

    def _key(self, variable: Any) -> Any:
        return variable.ref()

    def _variable_and_slots(self, variable: Any) -> list[Any]:
        if is_old(self._optimizer):
            slots = self._optimizer.get_slot_names()
            return [variable, *(self._optimizer.get_slot(variable, slot) for slot in slots)]
        optimizer = getattr(self._optimizer, "inner_optimizer", self._optimizer)
        index = optimizer._index_dict[optimizer._var_key(variable)]
        count = len(optimizer._index_dict)
        own = {id(each) for each in optimizer.variables}
        lists = [kept for kept in vars(optimizer).values() if isinstance(kept, list) and len(kept) == count]
        return [variable, *(kept[index] for kept in lists if id(kept[index]) in own)]


def is_reduced(optimizer: Any) -> dict[str, bool]:
    """Return the argument of `apply_gradients` that says so, of this optimizer of tf_keras."""
    return {"experimental_aggregate_gradients": False} if is_old(optimizer) else {"skip_gradients_aggregation": True}


class OpenWindow:
    """The passes of the update that is under way, by the names of Horovod's `LocalGradientAggregationHelper`.

    Args:
        update: whose passes they are.
    """

    def __init__(self, update: Update) -> None:
        self._update = update

    @property
    def counter(self) -> tf.Tensor:
        """The number of passes since the last update, a scalar. Outside of graphs, where it would never change.

        Raises:
            UsageError: within tf.function.
        """
        if not tf.executing_eagerly():
            raise UsageError("_agg_helper.counter was read within tf.function, which would keep it: read it outside")
        return tf.constant(self._update.window.num_passes)

    @property
    def backward_passes_per_step(self) -> int:
        """Passes that make one update."""
        return self._update.accumulation.passes

    @property
    def average_aggregated_gradients(self) -> bool:
        """Whether the update uses their mean, else their sum."""
        return self._update.accumulation.average


class _PlainApply:
    """The class of an optimizer before it was bound, as `Binding` calls it: with `apply`, which tf_keras lacks.

    Args:
        plain: the class.
    """

    def __init__(self, plain: type[Any]) -> None:
        self.name: str | None = None
        self._plain = plain

    def apply(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Apply reduced gradients. tf_keras would warn of each None, which is usual here: no rank had a gradient."""
        pairs = list(zip(gradients, variables, strict=True))
        given = [pair for pair in pairs if pair[0] is not None]
        self._plain.apply_gradients(optimizer, given or pairs, name=self.name, **is_reduced(optimizer))


def bind_legacy(optimizer: Any, update: Update) -> Any:
    """Bind `update` to `optimizer`, of tf_keras, and return it."""
    check_legacy(optimizer)
    plain = type(optimizer)
    optimizer.__class__ = bound_class(plain, LegacyOptimizerMixin)
    optimizer.__dict__["_unidist"] = LegacyBinding(optimizer, plain, update)
    return optimizer


def check_legacy(optimizer: Any) -> None:
    """Raise UsageError unless this is an optimizer of tf_keras that is not bound."""
    if isinstance(optimizer, LegacyOptimizerMixin):
        raise UsageError("this optimizer is distributed already; call DistributedOptimizer() once")
    if isinstance(getattr(optimizer, "inner_optimizer", None), LegacyOptimizerMixin):
        raise UsageError("the optimizer inside of this one is distributed already; distribute the outer one only")
