"""Tensor parallelism in JAX gives the numbers of one process, and says what it cannot do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from part_pools import PartPools

from unidist.errors import ConfigurationError, UsageError

jax = pytest.importorskip("jax", reason="the training is in JAX")

import jax.numpy as jnp  # noqa: E402 - after JAX is known to be there
import optax  # noqa: E402 - it needs JAX

import unidist.jax as ud  # noqa: E402 - it needs JAX

pytestmark = pytest.mark.parallel

WIDTH, HEADS, WORDS, TOKENS, BATCH = 8, 4, 18, 5, 4
PLAN = "words=vocabulary+blocks.*.qkv=qkv+blocks.*.out=row+blocks.*.up=column+blocks.*.down=row+head=vocabulary"


@pytest.fixture(scope="module")
def rank_pools(jax_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return jax_pools


def gpt(key: Any) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 20))

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
        "blocks": [block(), block()],
        "head": weight(WIDTH, WORDS),
    }


def loss_fn(params: Any, words: Any, key: Any = None) -> Any:
    x = params["words"][words] + params["places"]
    for block in params["blocks"]:
        x = x + jax.checkpoint(attend)(block, x)
        hidden = jax.nn.relu(apply(block["up"], norm(block, x)))
        if key is not None:
            hidden = hidden * jax.random.bernoulli(key, 0.5, hidden.shape)
        x = x + apply(block["down"], hidden)
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], jnp.roll(words, -1, 1)).mean()


def attend(block: Any, x: Any) -> Any:
    def heads(each: Any) -> Any:
        return each.reshape(*each.shape[:2], HEADS, WIDTH // HEADS)

    q, k, v = map(heads, jnp.split(apply(block["qkv"], norm(block, x)), 3, axis=-1))
    return apply(block["out"], jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


def apply(layer: Any, x: Any) -> Any:
    return x @ layer["kernel"] + layer["bias"]


def norm(block: Any, x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return block["norm"] * x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)


@pytest.mark.parametrize("strategy", ["", ",clip_norm=0.1,accumulate=2"])
def test_a_gpt_trains_as_in_one_process(jax_pools: PartPools, strategy: str) -> None:
    jax_pools.get(2, engine="shm").run(train_a_gpt, (f"tensor=2:plan={PLAN}{strategy}",))


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["tensor=2", "tensor=4"])
def test_a_gpt_on_more_ranks(jax_pools: PartPools, strategy: str) -> None:
    jax_pools.get(4, engine="shm").run(train_a_gpt, (f"{strategy}:plan={PLAN},zero=2,clip_norm=0.1",))


def train_a_gpt(strategy: str) -> None:
    ud.init()
    optimizer = optax.sgd(0.5, momentum=0.9)
    step = ud.TrainStep(loss_fn, gpt(jax.random.key(ud.rank())), optimizer, strategy=strategy)
    size, passes = ud.data_size(), 2 if "accumulate" in strategy else 1
    alone = gpt(jax.random.key(0))
    state = optimizer.init(alone)
    compute = jax.jit(jax.value_and_grad(loss_fn))
    total = jax.tree.map(jnp.zeros_like, alone)
    for count in range(4):
        words = jax.random.randint(jax.random.key(count), (size * BATCH, TOKENS), 0, WORDS)
        key = jax.random.key(count) if size == 1 else None
        found = step(words[ud.data_rank() :: size], key)
        wanted, gradients = compute(alone, words, key)
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
        total = jax.tree.map(lambda a, b: a + b / passes, total, gradients)
        if (count + 1) % passes == 0:
            if "clip" in strategy:
                factor = jnp.minimum(1.0, 0.1 / (optax.global_norm(total) + 1e-6))
                total = jax.tree.map(lambda each, factor=factor: each * factor, total)
            updates, state = optimizer.update(total, state, alone)
            alone = optax.apply_updates(alone, updates)
            total = jax.tree.map(jnp.zeros_like, alone)
    found = step.params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, alone)
    held = sum(leaf.size for leaf in jax.tree.leaves(step._held))
    assert held < 0.7 * sum(leaf.size for leaf in jax.tree.leaves(alone))
    step.params = alone
    np.testing.assert_allclose(step.evaluate(words[:BATCH]), loss_fn(alone, words[:BATCH]), rtol=1e-12)
    ud.shutdown()


def test_what_it_cannot_do_is_refused(jax_pools: PartPools) -> None:
    jax_pools.get(2, engine="shm").run(refuse)


def refuse() -> None:
    ud.init()
    params, plan = gpt(jax.random.key(0)), f"tensor=2:plan={PLAN}"
    with pytest.raises(ConfigurationError, match=r"say which layers to cut.*blocks/\*/qkv"):
        ud.TrainStep(loss_fn, params, optax.sgd(0.1), strategy="tensor=2")
    with pytest.raises(ConfigurationError, match="sequence=true is not for JAX"):
        ud.TrainStep(loss_fn, params, optax.sgd(0.1), strategy=f"{plan}:sequence=true")
    with pytest.raises(ConfigurationError, match="matches no layer"):
        ud.TrainStep(loss_fn, params, optax.sgd(0.1), strategy="tensor=2:plan=layers.*=row")
    with pytest.raises(UsageError, match="whole array"):
        ud.TrainStep(loss_fn, params, optax.lamb(0.1), strategy=plan)
    chained = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    with pytest.raises(UsageError, match="all parameters together"):
        ud.TrainStep(loss_fn, params, chained, strategy=plan)
    with pytest.raises(ConfigurationError, match=r"use TrainStep\(loss_fn"):
        ud.distribute(params, optax.sgd(0.1), strategy=plan)
    step = ud.TrainStep(loss_fn, params, optax.sgd(0.1), strategy=plan)
    words = jnp.zeros((BATCH, TOKENS), int)
    with pytest.raises(UsageError, match="compute one batch together, and got different inputs"):
        step(words + ud.rank())
    ud.shutdown()


def test_keys_of_dropout_that_differ_are_found(jax_pools: PartPools) -> None:
    jax_pools.get(2, engine="shm").run(draw_differently)


def draw_differently() -> None:
    ud.init()
    step = ud.TrainStep(loss_fn, gpt(jax.random.key(0)), optax.sgd(0.1), strategy=f"tensor=2:plan={PLAN}")
    words = jnp.zeros((BATCH, TOKENS), int)
    with pytest.raises(UsageError, match="draw random keys from"):
        step(words, jax.random.key(ud.rank()))
    ud.shutdown()
