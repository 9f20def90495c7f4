"""Optimizers of optax that compute in float32, on parameters and state that are kept in bfloat16.

What an optimizer updates in bfloat16 itself stands still as soon as the updates are smaller than half the distance to
the neighbouring number, 1/256 of the value. Here everything is widened for an update, and rounded after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from unidist.gradients.precision import Precision, Rounding
from unidist.optim.rounding_key import RoundingKey
from unidist_jax.optimizer.leaf_piece import LeafPiece
from unidist_jax.optimizer.state_leaves import places_of_state
from unidist_jax.optimizer.stochastic_rounding import round_stochastically

__all__ = ["NarrowOptimizer", "for_pieces", "kept_narrow"]


class NarrowOptimizer(optax.GradientTransformationExtraArgs):
    """An optimizer whose parameters and state are bfloat16.

    Its updates are float32: added to the parameters, they give the rounded values.

    Attributes:
        step: its functions.
    """

    step: _NarrowStep


def kept_narrow(
    plain: optax.GradientTransformationExtraArgs, precision: Precision | None, number: Callable[[], Any]
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer as a run of this precision needs it; the same one where nothing is rounded.

    Args:
        plain: the optimizer as it was.
        precision: of the run.
        number: returns the number of the update, a uint32 scalar; called in each update.
    """
    if precision is None or precision.rounding is None:
        return plain
    return _made(_NarrowStep(plain, precision.rounding, number, None))


def for_pieces(
    optimizer: optax.GradientTransformationExtraArgs, pieces: Sequence[LeafPiece]
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer for these pieces of the leaves: a narrow one rounds each element as that of a whole leaf."""
    if not isinstance(optimizer, NarrowOptimizer):
        return optimizer
    step = optimizer.step
    return _made(_NarrowStep(step.plain, step.rounding, step.number, [piece.start for piece in pieces]))


def _made(step: _NarrowStep) -> NarrowOptimizer:
    made = NarrowOptimizer(step.init, step.update)
    made.step = step
    return made


class _NarrowStep:
    """The functions of a `NarrowOptimizer`.

    Args:
        plain: the optimizer as it was.
        rounding: of what it has updated.
        number: of the update, see `kept_narrow`.
        starts: index of the first element of each array in its leaf; None: all are whole.
    """

    def __init__(
        self,
        plain: optax.GradientTransformationExtraArgs,
        rounding: Rounding,
        number: Callable[[], Any],
        starts: Sequence[int] | None,
    ) -> None:
        self.plain, self.rounding, self.number = plain, rounding, number
        self._starts = starts

    def init(self, params: Any) -> Any:
        """See `optax.GradientTransformation.init`."""
        leaves, structure = jax.tree.flatten(self.plain.init(jax.tree.map(_widened, params)))
        kept = self._kept(params, jax.tree.unflatten(structure, leaves))
        narrow = [
            leaf if place is None else leaf.astype(jnp.bfloat16) for leaf, place in zip(leaves, kept, strict=True)
        ]
        return jax.tree.unflatten(structure, narrow)

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        """See `optax.GradientTransformation.update`."""
        own, tree = jax.tree.flatten(params)
        if not any(map(_is_narrow, own)):
            return self.plain.update(updates, state, params, **extra)
        number = self.number() if self.rounding is Rounding.STOCHASTIC else None
        leaves, structure = jax.tree.flatten(state)
        wide = [
            _widened(leaf) if place is not None else leaf
            for leaf, place in zip(leaves, self._kept(params, state), strict=True)
        ]
        wide_params = jax.tree.map(_widened, params)
        updates, state = self.plain.update(
            jax.tree.map(_widened, updates), jax.tree.unflatten(structure, wide), wide_params, **extra
        )
        changes = jax.tree.leaves(updates)
        for place, (leaf, change) in enumerate(zip(own, changes, strict=True)):
            if _is_narrow(leaf):
                before = leaf.astype(jnp.float32)
                after = self._rounded(before + change, place, number, "")
                changes[place] = after.astype(jnp.float32) - before
        leaves, structure = jax.tree.flatten(state)
        narrow = [
            leaf if place is None else self._rounded(leaf, place, number, position)
            for position, (leaf, place) in enumerate(zip(leaves, self._kept(params, state), strict=True))
        ]
        return jax.tree.unflatten(tree, changes), jax.tree.unflatten(structure, narrow)

    def _kept(self, params: Any, state: Any) -> list[int | None]:
        """Return the places of the parameters that leaves of the state belong to, and are in bfloat16 with."""
        own = jax.tree.leaves(params)
        return [
            place if place is not None and _is_narrow(own[place]) and _is_slot(leaf) else None
            for leaf, place in zip(jax.tree.leaves(state), places_of_state(params, state), strict=True)
        ]

    def _rounded(self, wide: Any, place: int, number: Any, use: object) -> Any:
        if number is None:
            return wide.astype(jnp.bfloat16)
        start = 0 if self._starts is None else self._starts[place]
        return round_stochastically(wide, RoundingKey.of(place, use), number, start)


def _is_narrow(leaf: Any) -> bool:
    return bool(leaf.dtype == jnp.bfloat16)


def _is_slot(leaf: Any) -> bool:
    return leaf.dtype in (jnp.float32, jnp.bfloat16)


def _widened(leaf: Any) -> Any:
    return leaf.astype(jnp.float32) if getattr(leaf, "dtype", None) == jnp.bfloat16 else leaf
