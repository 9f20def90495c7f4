"""JAX on this machine: python -m tools.gpu.jax_checks RESULT. One process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import unidist.jax as ud


def main(output: str) -> None:
    """Train by `TrainStep` and by a compiled loop, and compare with optax alone."""
    ud.init()
    found: dict[str, Any] = {"versions": {"jax": jax.__version__, "device": str(ud.device())}}
    reduced = ud.allreduce(jnp.arange(3.0))
    found["by name"] = {"ok": bool((np.asarray(reduced) == np.arange(3.0)).all())}
    x, y = np.random.default_rng(0).standard_normal((2, 16, 8)).astype("float32")
    start = {"w": jnp.full((8, 8), 0.1)}

    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["w"]) - y) ** 2)

    optimizer = optax.adam(0.1)
    expected, state = start, optimizer.init(start)
    for _ in range(5):
        updates, state = optimizer.update(jax.grad(loss_fn)(expected, x, y), state, expected)
        expected = optax.apply_updates(expected, updates)
    for strategy in ("data", "zero=1", "zero=2", "clip_norm=1000"):
        step = ud.TrainStep(loss_fn, dict(start), optax.adam(0.1), strategy)
        for _ in range(5):
            step(x, y)
        error = float(jnp.abs(step.params["w"] - expected["w"]).max())
        found[strategy] = {"ok": error < 1e-5, "error": error}
    Path(output).write_text(json.dumps(found, indent=1))
    ud.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
