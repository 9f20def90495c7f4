"""A small GPT in JAX, with what makes it hard to divide, and its training beside that of one process."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import unidist.jax as ud

WIDTH, HEADS, WORDS, TOKENS, BATCH, BLOCKS = 8, 4, 18, 5, 8, 2


@jax.jit
def gpt(key: Any) -> dict[str, Any]:
    """Return its parameters."""
    keys = iter(jax.random.split(key, 40))

    def weight(*shape: int) -> Any:
        return 0.3 * jax.random.normal(next(keys), shape)

    def dense(inputs: int, outputs: int) -> dict[str, Any]:
        return {"kernel": weight(inputs, outputs), "bias": weight(outputs)}

    def block() -> dict[str, Any]:
        return {
            "norm": jnp.ones(WIDTH),
            "qkv": dense(WIDTH, 3 * WIDTH),
            "out": dense(WIDTH, WIDTH),
            "up": dense(WIDTH, 4 * WIDTH),
            "down": dense(4 * WIDTH, WIDTH),
        }

    return {
        "words": weight(WORDS, WIDTH),
        "places": weight(TOKENS, WIDTH),
        "blocks": [block() for _ in range(BLOCKS)],
        "temperature": jnp.ones(()),
        "unused": jnp.ones(3),
    }


def loss_fn(params: Any, words: Any, key: Any = None) -> Any:
    """Return its loss: the embedding is the output layer too, and kernels are kept small. With a key, with dropout."""
    x = params["words"][words] + params["places"]
    for block in params["blocks"]:
        x = x + jax.checkpoint(attend)({name: block[name] for name in ("norm", "qkv", "out")}, x)
        hidden = jax.nn.relu(apply(block["up"], norm(block, x)))
        if key is not None:
            hidden = hidden * jax.random.bernoulli(key, 0.5, hidden.shape)
        x = x + apply(block["down"], hidden)
    logits = params["temperature"] * (x @ params["words"].T)
    penalty = sum((block["up"]["kernel"] ** 2).sum() for block in params["blocks"])
    wanted = jnp.roll(words, -1, 1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean() + 1e-3 * penalty


def attend(block: Any, x: Any) -> Any:
    """Return the output of the attention of a block."""

    def heads(each: Any) -> Any:
        return each.reshape(*each.shape[:2], HEADS, WIDTH // HEADS)

    q, k, v = map(heads, jnp.split(apply(block["qkv"], norm(block, x)), 3, axis=-1))
    return apply(block["out"], jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


def apply(layer: Any, x: Any) -> Any:
    """Return the output of a dense layer."""
    return x @ layer["kernel"] + layer["bias"]


def norm(block: Any, x: Any) -> Any:
    """Return the input of a layer, normalised."""
    x = x - x.mean(-1, keepdims=True)
    return block["norm"] * x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.5, momentum=0.9),
    "muon": lambda: optax.contrib.muon(0.02),
    "lamb": lambda: optax.lamb(0.05, eps=1e-3),
    "adafactor": lambda: optax.adafactor(0.05, min_dim_size_to_factor=4),
}


def train_beside_one_process(
    strategy: str, *, drops: bool = False, optimizer: str = "sgd", folder: str = "", rtol: float = 1e-12
) -> None:
    """Train with a strategy that divides the model, and assert that the numbers are those of one process.

    Batches get smaller. `clip_norm=0.1` and `accumulate=2` in the strategy are done alone, too.

    Args:
        strategy: a strategy line.
        drops: with dropout, where all ranks have one batch.
        optimizer: name of `OPTIMIZERS`.
        folder: for a checkpoint, which ranks without a division of the model load at the end.
        rtol: largest difference between two losses, in relation to them.
    """
    ud.init()
    made = OPTIMIZERS[optimizer]()
    step = ud.TrainStep(loss_fn, gpt(jax.random.key(ud.rank())), made, strategy=strategy)
    size, passes = ud.data_size(), 2 if "accumulate" in strategy else 1
    alone = gpt(jax.random.key(0))
    state = made.init(alone)
    compute = jax.jit(jax.value_and_grad(loss_fn))
    total = jax.tree.map(jnp.zeros_like, alone)

    @jax.jit
    def update(total: Any, state: Any, alone: Any) -> tuple[Any, Any]:
        if "clip" in strategy:
            factor = jnp.minimum(1.0, 0.1 / (optax.global_norm(total) + 1e-6))
            total = jax.tree.map(lambda each: each * factor, total)
        updates, state = made.update(total, state, alone)
        return optax.apply_updates(alone, updates), state

    for count in range(4):
        words = jax.random.randint(jax.random.key(count), (size * (BATCH - count // 3), TOKENS), 0, WORDS)
        named = {"key": jax.random.key(count)} if drops and size == 1 else {}
        found = step(words[ud.data_rank() :: size], **named)
        wanted, gradients = compute(alone, words, **named)
        np.testing.assert_allclose(found, wanted, rtol=rtol)
        total = jax.tree.map(lambda a, b: a + b / passes, total, gradients)
        if (count + 1) % passes == 0:
            alone, state = update(total, state, alone)
            total = jax.tree.map(jnp.zeros_like, alone)
    close = functools.partial(np.testing.assert_allclose, rtol=100 * rtol, atol=rtol)
    jax.tree.map(close, step.params, alone)
    if folder:
        ud.save(folder, step)
    held = sum(leaf.size for leaf in jax.tree.leaves(step._held))
    assert held < 0.7 * sum(leaf.size for leaf in jax.tree.leaves(alone))
    step.params = alone
    np.testing.assert_allclose(step.evaluate(words[:BATCH]), loss_fn(alone, words[:BATCH]), rtol=1e-12)
    ud.shutdown()
    if folder:
        ud.init()
        other = ud.TrainStep(loss_fn, gpt(jax.random.key(1)), made, strategy="data")
        ud.load(folder, other)
        jax.tree.map(close, (other.params, other.opt_state), (alone, state))
        ud.shutdown()
