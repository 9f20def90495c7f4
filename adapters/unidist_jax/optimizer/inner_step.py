"""The step of a bound optimizer: from this rank's gradients to updates. A strategy that shards updates replaces it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from typing_extensions import override

from unidist_jax.memory import is_traced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from unidist.framework import Tensor
    from unidist_jax.optimizer.exchange import GradientLeaves
    from unidist_jax.optimizer.leaf_piece import LeafPiece


class InnerStep(ABC):
    """The step of one bound optimizer.

    `init` and `update` may be traced: then they work on tracers, and bind host operations.

    Attributes:
        sharded: this rank updates only its shard of the parameters, so it keeps the state of that shard only.
        has_moved: since `rebind` the script's state is of other pieces; what loads the present ones clears it.
        uses_exchange: it reduces gradients by the `GradientLeaves` that it is given.
    """

    uses_exchange: ClassVar[bool] = True

    sharded: bool = False
    has_moved: bool = False

    def prepare(self, tree: Any) -> None:  # noqa: B027 - most have nothing to choose
        """Choose options of the exchange. Called once, before it is made, on every rank; perhaps within a trace.

        Args:
            tree: like the parameters. Only the structure, and the shapes and types of its leaves, may be used.
        """

    def pulled(self, params: Any) -> Any:
        """Return the newest parameters, from where a strategy keeps them, outside of programs; else these."""
        return params

    @abstractmethod
    def init(self, params: Any, leaves: Callable[[], GradientLeaves]) -> Any:
        """Return the optimizer state that this rank keeps for these parameters, a tree of arrays.

        Args:
            params: the parameters.
            leaves: returns the exchange of their gradients, which is made at the first call. Collective then.
        """

    def rebind(self) -> None:  # noqa: B027 - most have nothing that depends on the ranks
        """Go on in a new generation of an elastic job, where the exchange is for other ranks. Only if `sharded`."""

    def pieces(self, leaves: Callable[[], GradientLeaves]) -> Sequence[LeafPiece] | None:
        """Return of which elements of each leaf the state of this rank is; None: of all. Collective as `init` is."""
        return None

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

    def apply(
        self,
        leaves: GradientLeaves,
        gradients: Sequence[Tensor],
        early: Sequence[int],
        state: Any,
        params: Any,
        structure: Any,
    ) -> tuple[Any, Any]:
        """Return the new parameters and the new state: `update`, for a caller that keeps both, as `TrainStep` does."""
        updates, state = self.update(leaves, gradients, early, state, params, structure, {})
        return optax.apply_updates(params, updates), state

    @abstractmethod
    def flush(self, leaves: GradientLeaves, state: Any, params: Any, structure: Any) -> tuple[Any, Any] | None:
        """Apply a window that was cut short, outside of compiled functions. Collective.

        Returns:
            The new parameters and the new state, as `apply` does; None if no rank has anything to apply.
        """

    def take_part(self) -> None:
        """Do the step on a rank that has joined, which has no gradients. Only called if `sharded`."""
        raise NotImplementedError(f"{type(self).__name__} is sharded, and cannot join")


class TracedStep(InnerStep):
    """An inner step that computes loss and gradients itself, from parameters that it holds in its own form.

    It needs the function of the loss, so it is used by `TrainStep` alone.
    """

    @abstractmethod
    def held(self, params: Any, leaves: GradientLeaves) -> Any:
        """Return what this rank holds of the parameters between two steps, a tree of arrays."""

    @abstractmethod
    def whole(self, held: Any) -> Any:
        """Return the parameters, on every rank. Collective."""

    @abstractmethod
    def evaluate(self, loss_fn: Callable[[Any], Any], held: Any) -> Any:
        """Return `loss_fn(params)`, a tree of arrays, within a trace."""

    @abstractmethod
    def train(
        self, loss_fn: Callable[[Any], tuple[Any, Any]], leaves: GradientLeaves, held: Any, state: Any
    ) -> tuple[Any, Any, Any]:
        """Compute gradients, exchange and apply them, within a trace. Collective where the program runs.

        Args:
            loss_fn: `loss_fn(params)` returns the loss to take gradients of, and a tree of arrays beside it.
            leaves: exchanges the gradients.
            held: as `held` or the last call has returned it.
            state: of the optimizer, as `init` or the last call has returned it.

        Returns:
            What `loss_fn` returned beside the loss, the new `held`, and the new state.
        """


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
        leaves.fused.update.applied()
        updates, state = self._plain.update(jax.tree.unflatten(structure, arrays), state, params)
        return optax.apply_updates(params, updates), state
