"""A small language model in JAX on batches that fill a budget of tokens, for ranks of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from token_budget_cases import ARGUMENTS, COUNT, IGNORED, VOCABULARY, numbers, padded, sample

import unidist.jax as ud
from unidist.errors import UsageError
from unidist.settings.environment import set_variables


def params() -> Any:
    """Return the model, with the same values everywhere."""
    generator = np.random.default_rng(5)
    return {"words": generator.normal(size=(VOCABULARY, 8)), "out": generator.normal(size=(8, VOCABULARY))}


def loss_fn(params: Any, tokens: Any, targets: Any) -> Any:
    """Return the mean over what counts, by a division that unidist does not find in the trace."""
    seen = jnp.cumsum(params["words"][tokens], 1) / (1 + jnp.arange(tokens.shape[1]))[:, None]
    logits = jnp.tanh(seen) @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    kept = (targets != IGNORED).astype(losses.dtype)
    return (losses * kept / jnp.maximum(jnp.broadcast_to(kept.sum(), kept.shape), 1)).sum()


def count(tokens: Any, targets: Any) -> Any:
    """Return the number of tokens that count."""
    del tokens
    return (targets != IGNORED).sum()


def trained(line: str, *, weighted: bool = True) -> tuple[list[float], list[list[int]]]:
    """Train one epoch under a strategy line; return the losses, and the samples of this rank in each step."""
    with set_variables({"UNIDIST_STRATEGY": line, "UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            step = ud.TrainStep(loss_fn, params(), optax.adam(0.05), weight=count if weighted else None)
            losses, seen = [], []
            for tokens, targets in ud.shard([sample(index) for index in range(COUNT)], collate=padded, **ARGUMENTS):
                seen.append(numbers(tokens))
                losses.append(float(step(tokens, targets)))
            return losses, seen
        finally:
            ud.shutdown()


def alone(steps: Sequence[Sequence[int]]) -> list[float]:
    """Return the losses of one process, without unidist, that trains on these samples in each step."""
    held, chosen = params(), optax.adam(0.05)
    state, losses = chosen.init(held), []
    function = jax.jit(jax.value_and_grad(loss_fn))
    for indices in steps:
        loss, gradients = function(held, *padded([sample(index) for index in indices]))
        losses.append(float(loss))
        updates, state = chosen.update(gradients, state, held)
        held = optax.apply_updates(held, updates)
    return losses


def refused_in_elastic_steps() -> str:
    """Return what an elastic `TrainStep` says about such batches."""
    with set_variables({"UNIDIST_ENGINE": "shm"}):
        ud.init()
        try:
            step = ud.TrainStep(loss_fn, params(), optax.adam(0.05), elastic=True)
            tokens, targets = next(iter(ud.shard([sample(0), sample(1)], collate=padded, cost=[9, 9], max_tokens=9)))
            step(tokens, targets)
        except UsageError as error:
            return str(error)
        finally:
            ud.shutdown()
    return ""
