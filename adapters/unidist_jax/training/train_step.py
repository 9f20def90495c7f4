"""`TrainStep`: one call that trains on a batch, the same with every strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from unidist.errors import UsageError
from unidist.runtime import context
from unidist.strategy.plan import StrategyLike
from unidist_jax.compiled import translated
from unidist_jax.framework import by_path
from unidist_jax.operations import allreduce, broadcast_parameters
from unidist_jax.optimizer.binding import Binding
from unidist_jax.training.distributed_optimizer import bind_to

_EARLY_BYTES = 4 << 20
"""Gradients are handed over in the backward pass in groups of this size: a call into Python for each costs 50 us."""


class TrainStep:
    """Forward, backward, exchange and update in one compiled call, which is the same with every strategy.

        step = ud.TrainStep(loss_fn, params, optax.adamw(1e-3))
        for x, y in ud.shard((features, labels), batch_size=32):
            loss = step(x, y)

    Gradients are exchanged while the backward pass runs. Copies rank 0's parameters to all ranks. Collective, and so is
    every call.

    Args:
        loss_fn: `loss_fn(params, *batch)` returns the mean loss over the samples, a scalar. It is traced by `jax.jit`.
        params: a tree of arrays of floating point, built in the same way on every rank.
        optimizer: of optax.
        strategy: a strategy line ("zero=1,accumulate=2"), strategy objects, or a list of both; default: the command
            line's (`unidist launch --strategy`), else plain data parallelism.

    Attributes:
        params: the parameters after the last step. The arrays of earlier steps are donated to the next one.
        opt_state: the optimizer state that this rank keeps.
        optimizer: the bound optimizer.

    Raises:
        ConfigurationError: the strategies do not fit the world, each other, or JAX.
        NotInitializedError: `init()` was not called.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        params: Any,
        optimizer: optax.GradientTransformation,
        strategy: StrategyLike = None,
    ) -> None:
        runtime = context.current()
        plan = runtime.plan_for(strategy)
        self._loss_fn = loss_fn
        params = broadcast_parameters(plan.prepare(params, runtime))
        self.optimizer = bind_to(plan, optimizer, params, average=True)
        self.params = jax.tree.map(jnp.array, params)  # of our own, since they are donated
        self.opt_state = jax.jit(self.optimizer.init)(self.params)
        self._binding: Binding = self.optimizer.binding
        self._groups = _groups(self.params)
        self._run = jax.jit(self._traced, donate_argnums=(0, 1))
        self._loss = jax.jit(self._evaluated)

    def __call__(self, *batch: Any) -> jax.Array:
        """Train on this rank's batch; returns the mean loss over all ranks, a scalar.

        Args:
            batch: what `loss_fn` takes after the parameters. Other shapes than before are compiled again.

        Raises:
            PeerLostError: a rank is gone.
            UsageError: the loss is no scalar of floating point.
        """
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(self.params)[:1]):
            raise UsageError(
                "the parameters are gone: an earlier step, to which they were donated, has failed. Set .params and "
                ".opt_state to those of a checkpoint, or make a new TrainStep"
            )
        with translated():
            self.params, self.opt_state, loss = self._run(self.params, self.opt_state, batch)
            return loss.block_until_ready()

    def evaluate(self, *batch: Any) -> jax.Array:
        """Return the mean loss of the ranks' batches, without an update. Collective."""
        with translated():
            return self._loss(self.params, batch).block_until_ready()

    def flush(self) -> bool:
        """Apply a window of `accumulate=N` that was cut short; returns whether there was one. Collective."""
        self.params, self.opt_state, applied = self.optimizer.flush(self.opt_state, self.params)
        return applied

    def _traced(self, params: Any, state: Any, batch: Sequence[Any]) -> tuple[Any, Any, Any]:
        self._binding.leaves(params)

        def loss_of(params: Any) -> Any:
            loss = self._loss_fn(self._handing_over(params), *batch)
            _check_loss(loss)
            return loss

        loss, gradients = jax.value_and_grad(loss_of)(params)
        early = [place for group in self._groups for place in group]
        updates, state = self._binding.step(gradients, state, params, early=early, extra={})
        mean = allreduce(loss, name="loss of a training step")
        return optax.apply_updates(params, updates), state, mean

    def _evaluated(self, params: Any, batch: Sequence[Any]) -> Any:
        loss = self._loss_fn(params, *batch)
        _check_loss(loss)
        return allreduce(loss, name="loss of an evaluation")

    def _handing_over(self, params: Any) -> Any:
        """Return the parameters, with gradients that are handed over as soon as the backward pass has computed them."""
        flat, structure = jax.tree.flatten(params)
        leaves = self._binding.leaves(params)
        for places in self._groups:

            @jax.custom_vjp
            def same(*group: Any) -> tuple[Any, ...]:
                return group

            def backward(_: None, gradients: tuple[Any, ...], places: Sequence[int] = places) -> tuple[Any, ...]:
                return tuple(leaves.take_early(places, gradients))

            same.defvjp(lambda *group: (group, None), backward)
            for place, leaf in zip(places, same(*(flat[place] for place in places)), strict=True):
                flat[place] = leaf
        return jax.tree.unflatten(structure, flat)


def _check_loss(loss: Any) -> None:
    leaves = jax.tree.leaves(loss)
    if not jax.tree_util.all_leaves([loss]):
        raise UsageError(
            f"loss_fn returned a {type(loss).__name__} of {len(leaves)} values; TrainStep needs the mean loss over the "
            "samples alone, a scalar of floating point"
        )
    if jnp.ndim(loss) or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise UsageError(
            f"loss_fn returned {jnp.result_type(loss)}{list(jnp.shape(loss))}; TrainStep needs the mean loss over the "
            "samples, a scalar of floating point"
        )


def _groups(params: Any) -> list[list[int]]:
    """Return groups of places whose gradients are handed over together, the last parameters first."""
    groups: list[list[int]] = [[]]
    nbytes = 0
    for place, leaf in reversed(list(enumerate(by_path(params).values()))):
        if nbytes >= _EARLY_BYTES:
            groups.append([])
            nbytes = 0
        groups[-1].append(place)
        nbytes += leaf.nbytes
    return [sorted(group) for group in groups if group]
