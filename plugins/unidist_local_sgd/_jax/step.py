"""Local SGD for optimizers of optax: the optimizer's own update, and a synchronization after those that need one.

Whether something is due is known on the host only, so a program asks for it, and exchanges within a branch. `TrainStep`
gets the new parameters themselves. A loop of the script's own gets their differences to the old ones, which it adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from typing_extensions import override

from unidist.errors import ConfigurationError, UsageError
from unidist_jax.compiled import bind, flush
from unidist_jax.framework import JaxFramework
from unidist_jax.memory import is_traced
from unidist_jax.optimizer import Cell, GradientLeaves, InnerStep
from unidist_local_sgd._jax.operations import Advance, Exchange, KeepStart, TreeState, TreeSynchronizer, copies_of
from unidist_local_sgd.binding import LocalSGDBinding

if TYPE_CHECKING:
    from unidist.framework import Tensor
    from unidist.optim import MakesInnerStep, Update
    from unidist_local_sgd.strategy import LocalSGD


class JaxLocalSGD(LocalSGDBinding):
    """See `LocalSGDBinding`."""

    @override
    def inner_step(self, strategy: LocalSGD) -> MakesInnerStep:
        def make(optimizer: Any, plain: type[Any], update: Update) -> InnerStep:
            if not isinstance(optimizer, tuple):  # as those of optax are
                raise ConfigurationError(
                    f"local_sgd has no binding for Keras on JAX, and {type(optimizer).__name__} is an optimizer of "
                    "Keras: use KERAS_BACKEND=tensorflow, or unidist.jax with an optimizer of optax"
                )
            if update.context.is_elastic:
                raise ConfigurationError(
                    "local_sgd with JAX cannot be in an elastic job; PyTorch and Keras on TensorFlow can. Leave "
                    "--min-np out, and save checkpoints"
                )
            return LocalStep(optax.with_extra_args_support(optimizer), update, strategy)

        return make


class LocalStep(InnerStep):
    """Updates with this rank's own gradients.

    Args:
        plain: the optimizer as it was.
        update: the framework-free side.
        strategy: its options.
    """

    def __init__(self, plain: optax.GradientTransformationExtraArgs, update: Update, strategy: LocalSGD) -> None:
        self._plain = plain
        self._keeps_start = strategy.is_relative
        self._always = update.accumulation.passes == 1 and update.scaler is None
        self._trained = TreeState()
        self._synchronizer = TreeSynchronizer(strategy, update, JaxFramework(), self._trained, update)
        self._update = update
        cell = Cell(self._synchronizer, self)
        self._advance, self._keep_start, self._exchange = Advance(cell), KeepStart(cell), Exchange(cell)

    @override
    def init(self, params: Any, leaves: Callable[[], GradientLeaves]) -> Any:
        return self._plain.init(params)

    @override
    def update(
        self,
        leaves: GradientLeaves,
        gradients: Sequence[Tensor],
        early: Sequence[int],
        state: Any,
        params: Any,
        structure: Any,
        extra: dict[str, Any],
    ) -> tuple[Any, Any]:
        complete, arrays = leaves.reduced(gradients, early)

        def step() -> tuple[Any, Any]:
            return self._step(arrays, state, params, structure, extra, as_updates=True)

        def stay() -> tuple[Any, Any]:
            return jax.tree.map(jnp.zeros_like, params), state

        return self._if_complete(complete, step, stay)

    @override
    def apply(
        self,
        leaves: GradientLeaves,
        gradients: Sequence[Tensor],
        early: Sequence[int],
        state: Any,
        params: Any,
        structure: Any,
    ) -> tuple[Any, Any]:
        complete, arrays = leaves.reduced(gradients, early)

        def step() -> tuple[Any, Any]:
            return self._step(arrays, state, params, structure, {}, as_updates=False)

        return self._if_complete(complete, step, lambda: (params, state))

    @override
    def flush(self, leaves: GradientLeaves, state: Any, params: Any, structure: Any) -> tuple[Any, Any] | None:
        result = leaves.fused.flush()
        if result is None or not result.complete:
            return None
        arrays = [jnp.asarray(gradient) for gradient in copies_of(result.gradients)]
        leaves.fused.update.applied()
        return self._step(arrays, state, params, structure, {}, as_updates=False)

    def synchronize(self, params: Any, opt_state: Any) -> tuple[Any, Any]:
        """End the window, and average the floating-point arrays of the optimizer's state. Collective.

        Returns:
            The trees, equal on all ranks.
        """
        flush()
        leaves, structure = jax.tree.flatten(params)
        kept, kept_structure = jax.tree.flatten(opt_state)
        averaged = [
            place
            for place, leaf in enumerate(kept)
            if isinstance(leaf, jax.Array) and leaf.ndim and jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        trained = self._trained
        trained.arrays = copies_of(leaves)
        trained.slot_arrays = dict(zip(map(str, averaged), copies_of([kept[place] for place in averaged]), strict=True))
        self._synchronizer.make_equal()
        for place in averaged:
            kept[place] = jax.device_put(trained.slot_arrays[str(place)], kept[place].sharding)
        found = [jax.device_put(array, leaf.sharding) for array, leaf in zip(trained.arrays, leaves, strict=True)]
        trained.arrays, trained.slot_arrays = [], {}
        return jax.tree.unflatten(structure, found), jax.tree.unflatten(kept_structure, kept)

    def _if_complete(
        self, complete: Any, step: Callable[[], tuple[Any, Any]], stay: Callable[[], tuple[Any, Any]]
    ) -> tuple[Any, Any]:
        if self._always:
            return step()
        found: tuple[Any, Any] = _choose(complete, step, stay)
        return found

    def _step(
        self, arrays: Sequence[Any], state: Any, params: Any, structure: Any, extra: dict[str, Any], *, as_updates: bool
    ) -> tuple[Any, Any]:
        """Make an update, which was counted already; returns the updates or the parameters, and the new state."""
        if params is None:
            raise UsageError(
                "local_sgd synchronizes parameters, so it needs them: optimizer.update(gradients, state, params)"
            )
        updates, state = self._plain.update(jax.tree.unflatten(structure, arrays), state, params, **extra)
        old, new = jax.tree.leaves(params), jax.tree.leaves(optax.apply_updates(params, updates))
        flat = jax.tree.leaves(updates)
        needs_start, is_due = bind(self._advance, [])
        if self._keeps_start:
            _choose(needs_start, lambda: bind(self._keep_start, old)[0], lambda: jnp.zeros((), bool))

        def exchanged() -> list[Any]:
            values = bind(self._exchange, new)
            if not as_updates:
                return values
            return [(value - before).astype(each.dtype) for value, before, each in zip(values, old, flat, strict=True)]

        found = _choose(is_due, exchanged, lambda: flat if as_updates else new)
        return jax.tree.unflatten(structure, found), state


def _choose(flag: Any, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
    """Return what one of two functions returns: at once, or in a program when it runs."""
    if not is_traced(flag):
        return first() if flag else second()
    return jax.lax.cond(flag, first, second)
