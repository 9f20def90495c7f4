"""The step of an optimizer in a program over all ranks, where XLA reduces the gradients: the engine `xla`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from typing_extensions import override

from unidist.builtin.data import DataParallel
from unidist.errors import ConfigurationError, UsageError
from unidist.gradients.options import ExchangeOptions
from unidist.optim.rules import GradientRule, NormRule, ValueRule
from unidist.strategy.interface import ActsOnGradients, UpdateGate
from unidist_jax.optimizer.inner_step import InnerStep
from unidist_jax.spmd import AXIS, is_within, spmd, summed, way_to_another_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from unidist.optim.update import Update
    from unidist_jax.optimizer.exchange import GradientLeaves


class AccumulatedState(NamedTuple):
    """The state of an optimizer that accumulates passes in a program over all ranks.

    Args:
        inner: of the optimizer itself.
        sums: of this rank's gradients in the window so far, a tree like the parameters.
        count: passes in it, an int32 scalar.
    """

    inner: Any
    sums: Any
    count: Any


class SpmdStep(InnerStep):
    """Every rank updates all parameters with gradients that XLA has reduced over the ranks.

    Args:
        plain: the optimizer as it was.
        update: names the strategies, the passes and the reduction. Nothing is exchanged by it.

    Raises:
        ConfigurationError: a strategy or an option that needs more than that.
    """

    uses_exchange: ClassVar[bool] = False

    def __init__(self, plain: optax.GradientTransformationExtraArgs, update: Update) -> None:
        check_strategies(update.strategies)
        _check_options(update)
        self._plain = plain
        self._accumulation = update.accumulation
        self._ranks = update.num_ranks if update.average else 1
        self._rules = [item.gradient_rule() for item in update.strategies if isinstance(item, ActsOnGradients)]

    @override
    def init(self, params: Any, leaves: Callable[[], GradientLeaves]) -> Any:
        inner = self._plain.init(params)
        if self._accumulation.passes == 1:
            return inner
        return AccumulatedState(inner, jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))

    @override
    def update(
        self,
        leaves: GradientLeaves,
        gradients: Sequence[Any],
        early: Sequence[int],
        state: Any,
        params: Any,
        structure: Any,
        extra: dict[str, Any],
    ) -> tuple[Any, Any]:
        if not is_within():
            raise UsageError(
                "the update of a distributed optimizer was called outside of a program over all ranks, with engine "
                "xla: call it in a function of ud.spmd, in place of jax.jit, or use TrainStep"
            )
        own = jax.tree.unflatten(structure, gradients)
        if self._accumulation.passes == 1:
            return self._plain.update(self._reduced(own, 1), state, params, **extra)
        sums = jax.tree.map(jnp.add, state.sums, own)

        def stay() -> tuple[Any, Any]:
            return jax.tree.map(jnp.zeros_like, own), AccumulatedState(state.inner, sums, state.count + 1)

        def step() -> tuple[Any, Any]:
            updates, inner = self._plain.update(self._reduced(sums, self._passes), state.inner, params, **extra)
            return updates, self._emptied(inner, sums)

        return jax.lax.cond(state.count + 1 == self._accumulation.passes, step, stay)

    @override
    def flush(self, leaves: GradientLeaves, state: Any, params: Any, structure: Any) -> tuple[Any, Any] | None:
        count = int(state.count)
        if count == 0:
            return None

        def apply(state: Any, params: Any) -> tuple[Any, Any]:
            passes = count if self._accumulation.average else 1
            updates, inner = self._plain.update(self._reduced(state.sums, passes), state.inner, params)
            return optax.apply_updates(params, updates), self._emptied(inner, state.sums)

        return tuple(spmd(apply)(state, params))

    @property
    def _passes(self) -> int:
        return self._accumulation.passes if self._accumulation.average else 1

    @staticmethod
    def _emptied(inner: Any, sums: Any) -> AccumulatedState:
        return AccumulatedState(inner, jax.tree.map(jnp.zeros_like, sums), jnp.zeros((), jnp.int32))

    def _reduced(self, sums: Any, passes: int) -> Any:
        """Return the gradient of an update, equal on all ranks.

        Args:
            sums: a tree of this rank's gradients, added up over the passes.
            passes: what the sum over ranks and passes is divided by, beside the number of ranks.
        """
        leaves, structure = jax.tree.flatten(sums)
        total = jax.tree.unflatten(structure, summed(leaves, AXIS))
        if self._ranks * passes != 1:
            total = jax.tree.map(lambda leaf: leaf / (self._ranks * passes), total)
        for rule in self._rules:
            total = _ruled(rule, total)
        return total


def _ruled(rule: GradientRule, gradient: Any) -> Any:
    """Return a whole gradient after a rule; see `unidist.optim.rules`, whose numbers these are."""
    if isinstance(rule, ValueRule):
        return jax.tree.map(lambda leaf: jnp.clip(leaf, -rule.limit, rule.limit), gradient)
    assert isinstance(rule, NormRule), "others were refused"
    wide = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
    sizes = [jnp.abs(leaf).astype(wide) for leaf in jax.tree.leaves(gradient) if leaf.size]
    if math.isinf(rule.order):
        norm = jnp.max(jnp.stack([jnp.max(each) for each in sizes]))
    else:
        norm = sum(jnp.sum(each**rule.order) for each in sizes) ** (1.0 / rule.order)
    factor = rule.limit / (norm + 1e-6)
    factor = jnp.where(factor >= 1.0, 1.0, factor)  # NaN stays
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.real.dtype), gradient)


def check_strategies(strategies: Sequence[object]) -> None:
    """Raise ConfigurationError if strategies need more than the sum over the ranks, which XLA computes."""
    for item in strategies:
        if isinstance(item, UpdateGate):
            continue
        if isinstance(item, ActsOnGradients) and isinstance(item.gradient_rule(), NormRule | ValueRule):
            continue
        if type(item) is DataParallel and item.compression is None:
            continue
        asked = f"strategy {getattr(item, 'name', item)!r}"
        if type(item) is DataParallel:
            asked = f"data:compression={item.compression}"
        raise ConfigurationError(
            f"engine xla trains with the strategies data (without compression), accumulate, clip_norm and clip_value; "
            f"{asked} needs another engine: {way_to_another_engine()}"
        )


def _check_options(update: Update) -> None:
    if update.options != ExchangeOptions():
        raise ConfigurationError(
            "engine xla takes no options of DistributedOptimizer but op= and backward_passes_per_step=: leave out "
            f"compression, process_set, groups and gradient_predivide_factor, or {way_to_another_engine()}"
        )
