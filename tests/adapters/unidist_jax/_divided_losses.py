"""Loss functions that are divided by what counts in a batch, for `test_loss_divisor`; the ranks import them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Loss = Callable[[Any, Any, Any], Any]


def errors(params: Any, x: Any) -> Any:
    return (jnp.tanh(x @ params["w"]) - 1) ** 2


def _logits(params: Any, x: Any) -> Any:
    return jnp.outer(x @ params["w"], jnp.arange(3.0))


def _decay(params: Any) -> Any:
    return 0.1 * (params["w"] ** 2).sum()


WEIGHTED: dict[str, Loss] = {
    "quotient": lambda p, x, m: (errors(p, x) * m).sum() / m.sum(),
    "with decay": lambda p, x, m: (errors(p, x) * m).sum() / m.sum() + _decay(p),
    "mean where": lambda p, x, m: jnp.mean(errors(p, x), where=m),
    "average": lambda p, x, m: jnp.average(errors(p, x), weights=m * 1.0),
    "maximum": lambda p, x, m: (errors(p, x) * m).sum() / jnp.maximum(m.sum(), 1),
    "where": lambda p, x, m: jnp.where(m.any(), (errors(p, x) * m).sum() / jnp.where(m.any(), m.sum(), 1), 0.0),
    "weights first": lambda p, x, m: (errors(p, x) * (m / m.sum())).sum(),
    "dot": lambda p, x, m: jnp.dot(errors(p, x), m / m.sum()),
    "reciprocal": lambda p, x, m: (errors(p, x) * m).sum() * (1 / m.sum()),
    "means": lambda p, x, m: (errors(p, x) * m).mean() / (m * 1.0).mean(),
    "jit": jax.jit(lambda p, x, m: (errors(p, x) * m).sum() / m.sum()),
    "checkpoint": jax.checkpoint(lambda p, x, m: (errors(p, x) * m).sum() / m.sum()),
    "two terms": lambda p, x, m: (errors(p, x) * m).sum() / m.sum() + 0.1 * ((x @ p["w"]) * m).sum() / m.sum(),
    "labels": lambda p, x, m: (
        (optax.softmax_cross_entropy_with_integer_labels(_logits(p, x), jnp.zeros(len(x), int)) * m).sum()
        / (m.size - (~m).sum())
    ),
}
"""Losses that are divided by the number of what counts."""

CONSTANT: dict[str, Loss] = {
    "mean": lambda p, x, m: errors(p, x).mean(),
    "with decay": lambda p, x, m: errors(p, x).mean() + _decay(p),
    "decay alone": lambda p, x, m: _decay(p),
    "of each sample its own": lambda p, x, m: (errors(p, x) / (1 + m)).mean(),
    "normalised advantages": lambda p, x, m: ((x @ p["w"]) * x[:, 0] / x[:, 0].std()).mean(),
}

PROBLEMS: dict[str, tuple[Loss, str]] = {
    "two divisors": (lambda p, x, m: WEIGHTED["quotient"](p, x, m) + errors(p, x).mean(), "a sum of terms"),
    "parameters": (lambda p, x, m: errors(p, x).sum() / jnp.exp(x @ p["w"]).sum(), "depends on the parameters, too"),
    "deviation": (lambda p, x, m: errors(p, x).mean() / x.std(), "is no sum over it"),
    "variance": (lambda p, x, m: errors(p, x).mean() / x.var(), "is no sum over it"),
}


def params() -> dict[str, Any]:
    return {"w": jnp.asarray(np.random.default_rng(1).standard_normal(3))}


def batch(rows: int = 4, counted: float = 0.5, seed: int = 1) -> tuple[Any, Any]:
    """Return features, and which samples count: with `counted` of them at least one."""
    generator = np.random.default_rng(seed)
    mask = generator.uniform(size=rows) < counted
    mask[0] = counted > 0
    return generator.standard_normal((rows, 3)), mask


def whole(counts: list[tuple[int, float]], seed: int) -> tuple[Any, Any]:
    parts = [batch(rows, counted, seed + rank) for rank, (rows, counted) in enumerate(counts)]
    return tuple(np.concatenate(each) for each in zip(*parts, strict=True))  # type: ignore[return-value]


COUNTS = [[(6, 0.9), (6, 0.2)], [(5, 0.9), (2, 0.5)], [(4, 0.9), (4, 0.0)]]
"""Of each batch and rank, the samples, and how many of them count: on rank 1 at last none."""
