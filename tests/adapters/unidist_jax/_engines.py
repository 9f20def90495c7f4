"""Operations and trainings over one engine, in float64; run by `test_engines` on every rank."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import unidist.jax as ud

STEPS = 6


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    """Mean squared error of a linear model."""
    return jnp.mean((x @ params["weight"] - y) ** 2)


def main() -> None:
    """Compare with numpy, and with one process on all samples."""
    jax.config.update("jax_enable_x64", True)
    ud.init()
    rank, size = ud.rank(), ud.size()
    own = jnp.arange(5.0) + rank
    everyones = np.arange(5.0) + np.arange(size)[:, None]
    mean, rows, last = jax.jit(lambda x: (ud.allreduce(x), ud.allgather(x), ud.broadcast(x, root_rank=size - 1)))(own)
    np.testing.assert_allclose(mean, everyones.mean(axis=0), atol=1e-12)
    np.testing.assert_array_equal(rows, everyones.reshape(-1))
    np.testing.assert_array_equal(last, everyones[-1])
    x = np.random.default_rng(0).normal(size=(4 * size, 3))
    y = x @ np.ones((3, 1))
    optimizer = optax.adam(0.1)
    params, state = {"weight": jnp.zeros((3, 1))}, optimizer.init({"weight": jnp.zeros((3, 1))})
    for _ in range(STEPS):
        updates, state = optimizer.update(jax.grad(loss_fn)(params, x, y), state, params)
        params = optax.apply_updates(params, updates)
    for strategy in ("data", "zero=1"):
        step = ud.TrainStep(loss_fn, {"weight": jnp.zeros((3, 1))}, optimizer, strategy=strategy)
        for _ in range(STEPS):
            step(x[rank::size], y[rank::size])
        np.testing.assert_allclose(step.params["weight"], params["weight"], rtol=0, atol=1e-12)
    ud.shutdown()
    print(f"rank {rank} is done")


if __name__ == "__main__":
    main()
