"""A bound optimizer of optax: its state on the host, and the pair of functions that scripts use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from unidist.elastic.rebinding import follow_generations
from unidist.errors import ConfigurationError, PluginError, UsageError
from unidist.gradients.buckets import ParameterInfo
from unidist.mesh import REPLICA_AXES
from unidist.negotiation.objects import gather_objects
from unidist.optim.update import Update
from unidist.runtime import context
from unidist.runtime_api import RuntimeAPI
from unidist_arrays.fused_exchange import ExchangeResult, FusedExchange
from unidist_jax.compiled import bind as bind_operation
from unidist_jax.compiled import flush as flush_programs
from unidist_jax.framework import JaxFramework, by_path
from unidist_jax.memory import as_jax, dtype_of
from unidist_jax.optimizer.acting import ActingStep, TreeState
from unidist_jax.optimizer.cell import Cell, release_abandoned
from unidist_jax.optimizer.exchange import GradientLeaves, UpdateNumber
from unidist_jax.optimizer.inner_step import InnerStep, WholeStep
from unidist_jax.optimizer.leaf_piece import LeafPiece
from unidist_jax.optimizer.narrow_optimizer import kept_narrow
from unidist_jax.optimizer.spmd_step import SpmdStep
from unidist_jax.spmd import is_chosen


class BoundOptimizer(optax.GradientTransformationExtraArgs):
    """An optimizer whose `update` exchanges the gradients first, at once or within a compiled function.

    A pair of functions as every optimizer of optax, so it goes wherever one goes. `update` is collective.

    Attributes:
        binding: its state on the host.
    """

    binding: Binding

    @property
    def _unidist(self) -> Binding:  # where bound optimizers of every framework have it
        return self.binding

    def flush(self, state: Any, params: Any) -> tuple[Any, Any, bool]:
        """Apply a window of `accumulate=N` that was cut short. Collective; outside of compiled functions.

        Args:
            state: the optimizer state.
            params: the parameters.

        Returns:
            The parameters, the state, and whether there was anything to apply on any rank.
        """
        return self.binding.flush(state, params)


class Binding:
    """The state of one bound optimizer.

    Args:
        plain: the optimizer as it was.
        update: the framework-free side, without parameters so far.

    Attributes:
        trained: the script's trees, while it lends them.
    """

    def __init__(self, plain: optax.GradientTransformationExtraArgs, update: Update) -> None:
        self.distributed_update = update
        number = UpdateNumber(Cell(update, self))
        self._plain = kept_narrow(plain, update.options.precision, lambda: bind_operation(number, [])[0])
        self._leaves: GradientLeaves | None = None
        self._types: list[tuple[tuple[int, ...], str]] = []
        self.inner = self._make_inner()
        self.trained = TreeState()
        update.trained = self.trained
        self._acting = ActingStep(update)
        follow_generations(self)

    def _make_inner(self) -> InnerStep:
        update = self.distributed_update
        if is_chosen():
            return SpmdStep(self._plain, update)
        if update.inner_steps is None:
            always = update.accumulation.passes == 1 and update.scaler is None and not update.context.is_elastic
            return WholeStep(self._plain, always=always)
        made = update.inner_steps.inner_step(JaxFramework(), update.context)(self._plain, type(self._plain), update)
        if not isinstance(made, InnerStep):
            raise PluginError(f"{type(made).__qualname__} does not derive from unidist_jax.optimizer.InnerStep")
        return made

    def rebind(self, context: RuntimeAPI) -> None:
        """Go on in a new generation of an elastic job, with the same compiled programs. Collective.

        Where each rank has pieces, programs are made for these: all are compiled again.

        Raises:
            ConfigurationError: the optimizer was used on some ranks only.
        """
        if len(set(gather_objects(context.axis(REPLICA_AXES), self._leaves is None))) > 1:
            raise ConfigurationError(
                "a distributed optimizer was used on some ranks, and on others not yet: call optimizer.init(params) "
                "before the elastic function begins"
            )
        if self._leaves is None:
            self.distributed_update.rebind(context)
        else:
            self._leaves.fused.prepare()
        if self.inner.sharded:
            self.inner.rebind()
            jax.clear_caches()

    def accumulate_steps(self, steps: int) -> None:
        """Let the next update take this many passes; every rank calls it between the same two updates."""
        assert self._leaves is not None, "the exchange was made"
        self._leaves.fused.accumulate_steps(steps)

    def init(self, params: Any) -> Any:
        """See `optax.GradientTransformation.init`."""
        if self.distributed_update.context.is_elastic:
            self.leaves(params)  # here, where every rank does it, and not while some trace their first step
        return self.inner.init(params, lambda: self.leaves(params))

    def pieces(self, params: Any) -> Sequence[LeafPiece] | None:
        """See `InnerStep.pieces`; collective if the state is sharded and was not made yet."""
        return self.inner.pieces(lambda: self._leaves or self.leaves(params))

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        """See `optax.GradientTransformation.update`; the updates are this rank's gradients of a pass."""
        return self.step(updates, state, params, early=(), extra=extra)

    def step(
        self, gradients: Any, state: Any, params: Any, *, early: Sequence[int], extra: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Do what `update` does, where some gradients were handed over in the backward pass."""
        leaves = self.leaves(gradients)
        flat, structure = jax.tree.flatten(gradients)
        arrays = [as_jax(leaf) for leaf in flat]
        updates, state = self.inner.update(leaves, arrays, early, state, params, structure, extra)
        return (self._acting.updates(params, updates) if self._acting else updates), state

    def apply(self, gradients: Any, state: Any, params: Any, *, early: Sequence[int]) -> tuple[Any, Any]:
        """Return the new parameters and the new state; see `InnerStep.apply`."""
        leaves = self.leaves(gradients)
        flat, structure = jax.tree.flatten(gradients)
        new, state = self.inner.apply(leaves, flat, early, state, params, structure)
        return (self._acting.parameters(params, new) if self._acting else new), state

    def leaves(self, tree: Any) -> GradientLeaves:
        """Return the exchange for the leaves of a tree like the parameters. Collective the first time.

        Raises:
            UsageError: the tree differs from that of an earlier call, or has leaves that have no gradient.
        """
        named = by_path(tree)
        types = [(tuple(np.shape(leaf)), str(jnp.result_type(leaf))) for leaf in named.values()]
        if self._leaves is None:
            self._leaves = self._make_leaves(tree, named)
            self._types = types
        elif types != self._types:  # not by their names: an optimizer of nnx has other ones in `init` than in `update`
            raise UsageError(
                "this distributed optimizer was used with other parameters before: their number, shapes or types "
                f"differ ({len(self._types)} leaves before, {len(types)} now). Distribute an optimizer for each"
            )
        return self._leaves

    def _make_leaves(self, tree: Any, named: Mapping[str, Any]) -> GradientLeaves:
        for name, leaf in named.items():
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
                raise UsageError(
                    f"the gradient of {name!r} is of {jnp.result_type(leaf)}: take gradients of floating-point "
                    "parameters only (equinox: eqx.filter(model, eqx.is_inexact_array); flax: nnx.split(model, "
                    "nnx.Param, ...))"
                )
        self.inner.prepare(tree)
        infos = [ParameterInfo(name, tuple(leaf.shape), dtype_of(leaf)) for name, leaf in named.items()]
        exchange = FusedExchange(
            self.distributed_update,
            infos,
            keeps_results=False,
            gathers=False,
            step_on_joined=_step_on_joined(self.inner) if self.inner.sharded else None,
        )
        if self.inner.uses_exchange:
            exchange.prepare()
        return GradientLeaves(exchange)

    def count_pass(self) -> None:
        """Count a pass in a program over all ranks, which cannot do so itself."""
        if self.distributed_update.window.count_step():
            self.distributed_update.applied()

    def flush(self, state: Any, params: Any) -> tuple[Any, Any, bool]:
        """See `BoundOptimizer.flush`."""
        if self._leaves is None or self.distributed_update.accumulation.passes == 1:
            return params, state, False
        flush_programs()  # which may not have handed over their gradients yet
        flushed = self.inner.flush(self._leaves, state, params, jax.tree.structure(params))
        if flushed is None:
            return params, state, False
        new, state = flushed
        return (self._acting.parameters(params, new) if self._acting else new), state, True


def _step_on_joined(inner: InnerStep) -> Callable[[ExchangeResult], None]:
    """Return what an exchange calls on a rank that has joined; it does not refer to the optimizer, see `Cell`."""
    take_part = weakref.WeakMethod(inner.take_part)

    def step(result: ExchangeResult) -> None:
        bound = take_part()
        if bound is not None:
            bound()

    return step


def bind(
    optimizer: optax.GradientTransformation, update: Update, *, names: Mapping[str, Any] | None = None
) -> BoundOptimizer:
    """Return the optimizer with an `update` that exchanges gradients; see `unidist.optim.BindsOptimizers`."""
    del names  # trees have names
    if isinstance(optimizer, BoundOptimizer):
        raise UsageError("this optimizer is distributed already; distribute the optimizer of optax itself, once")
    if isinstance(optimizer, optax.MultiSteps):  # an object that can be made into a pair of functions
        optimizer = optimizer.gradient_transformation()
    if not isinstance(optimizer, tuple) or not hasattr(optimizer, "update") or not hasattr(optimizer, "init"):
        raise UsageError(
            f"{type(optimizer).__name__} is no optimizer of optax: give a GradientTransformation, such as "
            "optax.adamw(1e-3)"
        )
    context.current()
    release_abandoned()
    binding = Binding(optax.with_extra_args_support(optimizer), update)
    bound = BoundOptimizer(binding.init, binding.update)
    bound.binding = binding
    return bound
