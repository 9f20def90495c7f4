"""Losses of loops around `jax.grad` that count as much as their weights say."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from unidist.errors import UsageError
from unidist.optim.update import Update, update_of
from unidist.training.weighted_loss import WeightedPass, weighted_update
from unidist_arrays.memory import Array
from unidist_jax.compiled import HostOperation, ShapeDtype, bind

__all__ = ["weighted"]


def weighted(loss: Any, weight: Any, *, optimizer: Any = None) -> Any:
    """Return a loss whose gradients count as much as its weight: a mean over all ranks' tokens, not of ranks' means.

        def loss_fn(params, x, y):
            counts = y != -100
            losses = optax.softmax_cross_entropy_with_integer_labels(model(params, x), y) * counts
            count = counts.sum()
            return ud.weighted(losses.sum() / jnp.maximum(count, 1), count)

    The gradient of the update is that of sum(losses) / sum(weights) over all ranks and over all passes of an update
    (`accumulate=N`). Collective: one exchange of a number. In compiled programs and at once; not in those of `ud.spmd`.

    Args:
        loss: of this rank's batch, a scalar: the sum of its losses, divided by the weight.
        weight: by what it was divided, a scalar: the tokens that count. 0: nothing of this batch does, and the loss
            must be finite all the same, as in the example.
        optimizer: whose gradients these are, from `distribute`; default: the only one that is distributed.

    Returns:
        A scalar whose mean over the ranks is the mean over the tokens of all ranks in this pass; 0 if there are none.

    Raises:
        UsageError: on all ranks: a weight is negative or not finite. There is no distributed optimizer, or there are
            several; several passes make an update, and one of them adds up losses with different weights.
    """
    update = weakref.ref(weighted_update(optimizer, _update_of))  # a program keeps its operations for ever
    loss = jnp.asarray(loss)

    @jax.custom_vjp
    def scaled(loss: Any, number: Any) -> Any:
        return forward(loss, number)[0]

    def forward(loss: Any, number: Any) -> Any:
        of_value, share, total = bind(_OfValue(update), [number])
        return loss * of_value.astype(loss.dtype), (share, total)

    def backward(kept: Any, gradient: Any) -> Any:
        (factor,) = bind(_OfGradients(update), kept)
        return gradient * factor.astype(gradient.dtype), jnp.zeros_like(factor)

    scaled.defvjp(forward, backward)
    return scaled(loss, jax.lax.stop_gradient(jnp.reshape(jnp.asarray(weight, float), ())))


def _update_of(optimizer: Any) -> Update | None:
    binding = getattr(optimizer, "binding", None)
    return update_of(optimizer) if binding is None else binding.distributed_update


class _OfUpdate(HostOperation):
    can_be_batched = False

    def __init__(self, update: weakref.ref[Update]) -> None:
        self._reference = update

    @property
    def _update(self) -> Update:
        found = self._reference()
        if found is None:
            raise UsageError("a function weights a loss for an optimizer that is no more: keep the optimizer")
        return found

    @property
    @override
    def title(self) -> str:
        return "the exchange of the weights of a loss"


class _OfValue(_OfUpdate):
    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return [operands[0]] * 3

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        found = WeightedPass.of(self._update, float(operands[0]))
        for result, value in zip(results, (found.of_value, *found), strict=True):
            result[...] = np.asarray(value, result.dtype)


class _OfGradients(_OfUpdate):
    @override
    def results(self, operands: Sequence[ShapeDtype]) -> list[ShapeDtype]:
        return [operands[0]]

    @override
    def run(self, operands: Sequence[Array], results: Sequence[Array]) -> None:
        found = WeightedPass(float(operands[0]), float(operands[1]))
        results[0][...] = found.of_gradients(self._update)
