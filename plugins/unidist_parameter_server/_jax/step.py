"""The inner step of an optimizer of optax whose parameters are in a store.

The optimizer runs in the program, on this worker's own gradients, and the differences that it makes are pushed. Its
state is this worker's. `TrainStep` gets the parameters of the store themselves. A loop of the script's own gets their
differences to those that it has, which it adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from typing_extensions import override

from unidist.errors import ConfigurationError, UsageError
from unidist_jax.compiled import bind, flush
from unidist_jax.memory import is_traced
from unidist_jax.operations import broadcast_parameters
from unidist_jax.optimizer import Cell, GradientLeaves, InnerStep
from unidist_parameter_server._jax.pushing import PushAndFetch, PushedLeaves
from unidist_parameter_server.binding import ParameterServerBinding

if TYPE_CHECKING:
    from unidist.framework import Tensor
    from unidist.optim import MakesInnerStep, Update
    from unidist.runtime_api import RuntimeAPI
    from unidist_parameter_server.strategy import ParameterServer


class JaxParameterServer(ParameterServerBinding):
    """See `ParameterServerBinding`."""

    @override
    def inner_step(self, strategy: ParameterServer) -> MakesInnerStep:
        def make(optimizer: Any, plain: type[Any], update: Update) -> InnerStep:
            if not isinstance(optimizer, tuple):  # as those of optax are
                raise ConfigurationError(
                    f"{strategy.name} has no binding for Keras on JAX, and {type(optimizer).__name__} is an optimizer "
                    "of Keras: use KERAS_BACKEND=tensorflow, or unidist.jax with an optimizer of optax"
                )
            if strategy.push != "delta":
                raise ConfigurationError(
                    f"{strategy.name}={strategy.mode} with JAX: a store cannot run optimizers of optax, which are "
                    f"functions. Let workers push differences: --strategy parameter_server={strategy.mode}:push=delta"
                )
            if update.context.is_elastic:
                raise ConfigurationError(
                    f"{strategy.name} with JAX cannot be in an elastic job: leave --min-np out, and save checkpoints"
                )
            return JaxStoreStep(strategy, optax.with_extra_args_support(optimizer), update)

        return make


class JaxStoreStep(InnerStep):
    """Pushes differences and fetches parameters; see the module's text.

    Args:
        strategy: its options.
        plain: the optimizer as it was.
        update: the framework-free side.

    Attributes:
        before: see `StoreStep`.
    """

    def __init__(self, strategy: ParameterServer, plain: optax.GradientTransformationExtraArgs, update: Update) -> None:
        self.before: Any = None
        self._plain = plain
        self._update = update
        self._always = update.accumulation.passes == 1
        self._leaves = PushedLeaves(strategy.worker_options(), update)
        self._push = PushAndFetch(Cell(self._leaves, self))

    @property
    def has_moved(self) -> bool:
        """False: every rank has the whole state. Loading a checkpoint sets it, and the store is filled again then."""
        return False

    @has_moved.setter
    def has_moved(self, value: bool) -> None:
        self._leaves.is_filled = False

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
            found, after = self._step(arrays, state, params, structure, extra)
            return jax.tree.map(lambda new, old: new - old, found, params), after

        return self._if_complete(complete, step, lambda: (jax.tree.map(jnp.zeros_like, params), state))

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
        return self._if_complete(
            complete, lambda: self._step(arrays, state, params, structure, {}), lambda: (params, state)
        )

    @override
    def flush(self, leaves: GradientLeaves, state: Any, params: Any, structure: Any) -> tuple[Any, Any] | None:
        result = leaves.fused.flush()
        if result is None or not result.complete:
            return None
        arrays = [jnp.asarray(np.array(gradient)) for gradient in result.gradients]
        leaves.fused.update.applied()
        return self._step(arrays, state, params, structure, {})

    def _if_complete(
        self, complete: Any, step: Callable[[], tuple[Any, Any]], stay: Callable[[], tuple[Any, Any]]
    ) -> tuple[Any, Any]:
        if self._always:
            return step()
        if not is_traced(complete):
            return step() if complete else stay()
        first, second = jax.lax.cond(complete, step, stay)
        return first, second

    def _step(
        self, arrays: Sequence[Any], state: Any, params: Any, structure: Any, extra: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Make an update; returns the parameters after it, and the new state."""
        if params is None:
            raise UsageError(
                "parameter_server pushes what an update makes of the parameters, so it needs them: "
                "optimizer.update(gradients, state, params)"
            )
        updates, state = self._plain.update(jax.tree.unflatten(structure, arrays), state, params, **extra)
        before, after = jax.tree.leaves(params), jax.tree.leaves(optax.apply_updates(params, updates))
        return jax.tree.unflatten(structure, bind(self._push, [*before, *after])), state

    # The store, outside of programs

    @override
    def pulled(self, params: Any) -> Any:
        """Return the newest parameters, a tree like `params`; that itself before the first update. Not collective."""
        if not self.is_filled:
            return params
        self._leaves.fetch()
        return self._tree(params)

    def synchronized(self, params: Any, opt_state: Any) -> tuple[Any, Any]:
        """Return the parameters of the store and rank 0's optimizer state, on all ranks. Collective."""
        if self.is_filled:
            self._leaves.settle()
            params = self._tree(params)
        return params, broadcast_parameters(opt_state)

    def _tree(self, params: Any) -> Any:
        leaves, structure = jax.tree.flatten(params)
        arrays = [np.empty(leaf.shape, leaf.dtype) for leaf in leaves]
        self._leaves.read(arrays)
        found = [jax.device_put(array, leaf.sharding) for array, leaf in zip(arrays, leaves, strict=True)]
        return jax.tree.unflatten(structure, found)

    @property
    def is_filled(self) -> bool:
        """See `StoreStep.is_filled`. Waits for the programs that were called, as it is they that fill the store."""
        flush()
        return self._leaves.is_filled

    def is_of(self, context: RuntimeAPI) -> bool:
        """See `StoreStep.is_of`."""
        return self._update.context is context

    def bring(self) -> None:
        """See `StoreStep.bring`: only elastic jobs ask for it."""

    def before_commit(self) -> None:
        """See `StoreStep.before_commit`: only elastic jobs ask for it."""

    def close(self) -> None:
        """See `StoreStep.close`."""
        self._leaves.leave()

    def pull(self) -> None:
        """Do nothing: arrays of JAX do not change. See `pulled`."""

    def settle(self) -> None:
        """See `StoreStep.settle`.

        Raises:
            UsageError: the script did not call `synchronize` after the last step.
        """
        if self.is_filled and not self._leaves.is_settled:
            raise UsageError(
                "parameter_server: the ranks' parameters and optimizer states may differ, and arrays of JAX do not "
                "change. Before save call synchronize(step), or params, opt_state = synchronize(optimizer, params, "
                "opt_state), of unidist_parameter_server.jax"
            )
