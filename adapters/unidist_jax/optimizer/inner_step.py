"""From reduced gradients to updates: what a strategy that shards updates replaces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Sequence

    import optax

    from unidist.framework import Tensor
    from unidist_jax.optimizer.exchange import GradientLeaves


class InnerStep(ABC):
    """The step of one bound optimizer. Its methods are traced: they work on tracers, and may bind host operations.

    Attributes:
        sharded: this rank updates only its shard of the parameters, so it keeps the state of that shard only.
    """

    sharded: bool = False

    @abstractmethod
    def init(self, params: Any) -> Any:
        """Return the optimizer state that this rank keeps for these parameters, a tree of arrays."""

    @abstractmethod
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
        """Return the updates of all parameters, a tree like `params`, and the new state.

        Within a window of several passes, and where a gradient has overflowed, the updates are zeros and the state is
        the old one.

        Args:
            leaves: exchanges the gradients.
            gradients: of this rank, by leaf.
            early: places of those that were handed over in the backward pass.
            state: as `init` or the last call has returned it.
            params: the parameters, or None if the script did not give them.
            structure: of the tree of gradients.
            extra: further arguments of the script, for the inner optimizer.
        """

    def take_part(self) -> None:
        """Do the step on a rank that has joined, which has no gradients. Only called if `sharded`."""
        raise NotImplementedError(f"{type(self).__name__} is sharded, and cannot join")


class WholeStep(InnerStep):
    """Every rank updates all parameters with the reduced gradients.

    Args:
        plain: the optimizer as it was.
        always: every pass is an update, so that nothing needs to be chosen while a program runs.
    """

    def __init__(self, plain: optax.GradientTransformationExtraArgs, *, always: bool) -> None:
        self._plain = plain
        self._always = always

    @override
    def init(self, params: Any) -> Any:
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
        complete, reduced = leaves.reduced(gradients, early)
        return self.apply(complete, jax.tree.unflatten(structure, reduced), state, params, extra)

    def apply(self, complete: Any, reduced: Any, state: Any, params: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
        """Return the updates and the new state for reduced gradients, where a pass completes an update."""
        if self._always:
            return self._plain.update(reduced, state, params, **extra)

        def stay() -> tuple[Any, Any]:
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(step)[0]), state

        def step() -> tuple[Any, Any]:
            return self._plain.update(reduced, state, params, **extra)

        return jax.lax.cond(complete, step, stay)
