"""A small training, and its numbers in one process on one device; imported by the ranks of a pool."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

_STEPS = 4

STRATEGIES: dict[str, tuple[int, float | None]] = {
    "data": (1, None),
    "accumulate=2,clip_norm=0.1": (2, 0.1),
    "zero=1": (1, None),
}
"""Passes of an update, and the largest norm, by strategy line."""


def loss_of(params: Any, x: Any, y: Any) -> Any:
    """Return the mean loss of a batch."""
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"] - y) ** 2)


def parameters(seed: int) -> dict[str, Any]:
    """Return parameters; those of rank 0 count."""
    generator = np.random.default_rng(seed)
    return {"w": jnp.asarray(generator.standard_normal((3, 5))), "v": jnp.ones(5), "b": jnp.zeros(())}


def batches(rank: int, size: int) -> list[tuple[Any, Any]]:
    """Return a rank's rows of 12 in each batch."""
    generator = np.random.default_rng(9)
    x, y = generator.standard_normal((_STEPS, 12, 3)), generator.standard_normal((_STEPS, 12))
    return [(x[index, rank::size], y[index, rank::size]) for index in range(_STEPS)]


def optimizer() -> optax.GradientTransformation:
    """Return a new optimizer of optax."""
    return optax.adamw(0.05)


def alone(strategy: str) -> tuple[Any, list[float]]:
    """Train in one process on one device; returns the parameters, and the loss of each batch."""
    passes, clip_norm = STRATEGIES[strategy]
    params, plain = parameters(0), optimizer()
    state, losses = plain.init(params), []
    total = None
    for step, batch in enumerate(batches(0, 1), start=1):
        loss, gradients = jax.value_and_grad(loss_of)(params, *batch)
        losses.append(loss.item())
        total = gradients if total is None else jax.tree.map(jnp.add, total, gradients)
        if step % passes:
            continue
        mean = jax.tree.map(lambda leaf: leaf / passes, total)
        if clip_norm is not None:
            factor = jnp.minimum(1.0, clip_norm / (optax.global_norm(mean) + 1e-6))
            mean = jax.tree.map(lambda leaf, factor=factor: leaf * factor, mean)
        updates, state = plain.update(mean, state, params)
        params, total = optax.apply_updates(params, updates), None
    return params, losses


def check(strategy: str, params: Any, losses: list[Any]) -> None:
    """Compare with the numbers of one process, on each device."""
    wanted, wanted_losses = alone(strategy)
    for name, each in wanted.items():
        for shard in params[name].addressable_shards:
            np.testing.assert_allclose(shard.data, each, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose([loss.item() for loss in losses], wanted_losses, rtol=1e-12)
