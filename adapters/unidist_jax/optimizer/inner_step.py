"""The step of a bound optimizer: from this rank's gradients to updates. A strategy that shards updates replaces it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from unidist_jax.memory import is_traced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import optax

    from unidist.framework import Tensor
    from unidist_jax.optimizer.exchange import GradientLeaves


class InnerStep(ABC):
    """The step of one bound optimizer.

    `init` and `update` may be traced: then they work on tracers, and bind host operations.

    Attributes:
        sharded: this rank updates only its shard of the parameters, so it keeps the state of that shard only.
    """

    sharded: bool = False

    def prepare(self, tree: Any) -> None:  # noqa: B027 - most have nothing to choose
        """Choose options of the exchange. Called once, before it is made, on every rank; perhaps within a trace.

        Args:
            tree: like the parameters. Only the structure, and the shapes and types of its leaves, may be used.
        """

    @abstractmethod
    def init(self, params: Any, leaves: Callable[[], GradientLeaves]) -> Any:
        """Return the optimizer state that this rank keeps for these parameters, a tree of arrays.

        Args:
            params: the parameters.
            leaves: returns the exchange of their gradients, which is made at the first call. Collective then.
        """

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

    @abstractmethod
    def flush(self, leaves: GradientLeaves, state: Any, params: Any, structure: Any) -> tuple[Any, Any] | None:
        """Apply a window that was cut short, outside of compiled functions. Collective.

        Returns:
            The updates and the new state, as `update` does; None if no rank has anything to apply.
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
        reduced = jax.tree.unflatten(structure, arrays)
        if self._always:
            return self._plain.update(reduced, state, params, **extra)

        def stay() -> tuple[Any, Any]:
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(step)[0]), state

        def step() -> tuple[Any, Any]:
            return self._plain.update(reduced, state, params, **extra)

        if not is_traced(complete):  # at once: `cond` would be compiled in each pass
            return step() if complete else stay()
        return jax.lax.cond(complete, step, stay)

    @override
    def flush(self, leaves: GradientLeaves, state: Any, params: Any, structure: Any) -> tuple[Any, Any] | None:
        result = leaves.fused.flush()
        if result is None or not result.complete:
            return None
        arrays = [jax.device_put(np.array(gradient)) for gradient in result.gradients]
        updates, state = self._plain.update(jax.tree.unflatten(structure, arrays), state, params)
        leaves.fused.update.applied()
        return updates, state
