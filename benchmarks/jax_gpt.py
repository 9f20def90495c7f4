"""The GPT of `benchmarks.gpt` in JAX: 17 million parameters, 8 layers of width 384, 64 tokens of context."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.gpt import CONTEXT, HEADS, LAYERS, VOCABULARY, WIDTH


def parameters() -> dict[str, Any]:
    """Return new parameters."""
    keys = iter(jax.random.split(jax.random.key(0), 4 * LAYERS + 3))

    def weight(*shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), shape)

    def norm() -> dict[str, jax.Array]:
        return {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}

    def block() -> dict[str, Any]:
        shapes = {"qkv": 3 * WIDTH, "out": WIDTH, "up": 4 * WIDTH}
        dense = {name: {"w": weight(WIDTH, size), "b": jnp.zeros(size)} for name, size in shapes.items()}
        down = {"w": weight(4 * WIDTH, WIDTH), "b": jnp.zeros(WIDTH)}
        return {"norm1": norm(), "norm2": norm(), **dense, "down": down}

    return {
        "tokens": weight(VOCABULARY, WIDTH),
        "positions": weight(CONTEXT, WIDTH),
        "blocks": [block() for _ in range(LAYERS)],
        "norm": norm(),
        "head": weight(WIDTH, VOCABULARY),
    }


def loss_of(params: dict[str, Any], ids_bt: jax.Array) -> jax.Array:
    """Return the mean loss of predicting each next token."""
    inputs_bt, targets_bt = ids_bt[:, :-1], ids_bt[:, 1:]
    x_btd = params["tokens"][inputs_bt] + params["positions"]
    for block in params["blocks"]:
        parts = jnp.split(_dense(_normalized(x_btd, block["norm1"]), block["qkv"]), 3, -1)
        q, k, v = (part.reshape(*part.shape[:2], HEADS, -1) for part in parts)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x_btd.shape)
        x_btd = x_btd + _dense(attended, block["out"])
        x_btd = x_btd + _dense(jax.nn.gelu(_dense(_normalized(x_btd, block["norm2"]), block["up"])), block["down"])
    logits_btv = _normalized(x_btd, params["norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits_btv, targets_bt).mean()


def _dense(x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
    return x @ layer["w"] + layer["b"]


def _normalized(x: jax.Array, norm: dict[str, jax.Array]) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * norm["scale"] + norm["bias"]
