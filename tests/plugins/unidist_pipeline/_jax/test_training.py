"""Pipelines in JAX give the numbers of one process, and say what they cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from part_pools import PartPools

from unidist.errors import ConfigurationError, PeerLostError, UsageError

jax = pytest.importorskip("jax", reason="the training is in JAX")

import jax.numpy as jnp  # noqa: E402 - after JAX is known to be there
import optax  # noqa: E402 - it needs JAX
from gpt_jax import BATCH, TOKENS, WORDS, train_beside_one_process  # noqa: E402

import unidist.jax as ud  # noqa: E402

pytestmark = pytest.mark.parallel


@pytest.fixture(scope="module")
def rank_pools(jax_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return jax_pools


@pytest.mark.parametrize(
    "strategy",
    [
        "pipeline=2",
        "pipeline=2:schedule=gpipe:microbatches=3,clip_norm=0.1,accumulate=2",
        "pipeline=2:schedule=zbv:split=blocks.0.up+blocks.1+blocks/1/up",
    ],
)
def test_a_gpt_trains_as_in_one_process(jax_pools: PartPools, strategy: str) -> None:
    jax_pools.get(2).run(train_beside_one_process, (strategy,))


@pytest.mark.soak
@pytest.mark.parametrize(
    "strategy",
    [
        "pipeline=2:microbatches=2,zero=1,clip_norm=0.1",
        "pipeline=4:schedule=zb-h1",
        "pipeline=2:schedule=interleaved:microbatches=4,zero=2",
    ],
)
def test_a_gpt_on_more_ranks(jax_pools: PartPools, strategy: str) -> None:
    jax_pools.get(4).run(train_beside_one_process, (strategy,))


def test_a_checkpoint_is_of_the_whole_model(jax_pools: PartPools, tmp_path: Path) -> None:
    jax_pools.get(2).run(save_and_load, (str(tmp_path / "saved"),))


def save_and_load(folder: str) -> None:
    ud.init()
    optimizer, strategy = optax.adam(0.01), "pipeline=2:microbatches=2,zero=1"
    words = jax.random.randint(jax.random.key(1), (BATCH, TOKENS), 0, WORDS)
    step = ud.TrainStep(perceptron_loss, perceptron(), optimizer, strategy=strategy)
    with pytest.raises(UsageError, match=r"once before save and load"):
        ud.save(folder, step)
    step(words)
    ud.save(folder, step)
    again = ud.TrainStep(perceptron_loss, jax.tree.map(jnp.zeros_like, perceptron()), optimizer, strategy=strategy)
    again.evaluate(words)
    ud.load(folder, again)
    for _ in range(2):
        np.testing.assert_array_equal(again(words), step(words))
    ud.shutdown()
    ud.init()
    other = ud.TrainStep(perceptron_loss, jax.tree.map(jnp.zeros_like, perceptron()), optimizer)
    ud.load(folder, other)
    np.testing.assert_allclose(other(words), step_after_one(words, optimizer), rtol=1e-12)
    ud.shutdown()


def step_after_one(words: Any, optimizer: optax.GradientTransformation) -> Any:
    """Return the loss of the second step of one process."""
    params = perceptron()
    updates, _ = optimizer.update(jax.grad(perceptron_loss)(params, words), optimizer.init(params), params)
    return perceptron_loss(optax.apply_updates(params, updates), words)


def perceptron() -> dict[str, Any]:
    return {f"layer{number}": 0.1 + jnp.eye(TOKENS) for number in range(4)}


def perceptron_loss(params: Any, words: Any, key: Any = None, scale: Any = 1.0) -> Any:
    x = words / WORDS
    for kernel in params.values():
        x = jnp.tanh(x @ kernel)
        if key is not None:
            x = x * jax.random.bernoulli(key, 0.5, x.shape[1:])
    return (scale * x).mean()


def test_a_perceptron_trains_as_in_one_process(jax_pools: PartPools) -> None:
    jax_pools.get(2).run(train_a_perceptron)


def train_a_perceptron() -> None:
    ud.init()
    words = jax.random.randint(jax.random.key(1), (BATCH, TOKENS), 0, WORDS)
    params, optimizer = perceptron(), optax.adam(0.1)
    step = ud.TrainStep(perceptron_loss, params, optimizer, strategy="pipeline=2")
    state = optimizer.init(params)
    for _ in range(3):
        loss, gradients = jax.value_and_grad(perceptron_loss)(params, words)
        np.testing.assert_allclose(step(words), loss, rtol=1e-12)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    ud.shutdown()


def test_arguments_by_name_are_whole_and_keys_differ_by_micro_batch(jax_pools: PartPools) -> None:
    jax_pools.get(2).run(give_arguments_by_name)


def give_arguments_by_name() -> None:
    ud.init()
    step = ud.TrainStep(perceptron_loss, perceptron(), optax.sgd(0.1), strategy="pipeline=2:microbatches=2")
    words, key = jax.random.randint(jax.random.key(1), (BATCH, TOKENS), 0, WORDS), jax.random.key(3)
    scale = np.arange(TOKENS) + 1.0
    losses = [
        perceptron_loss(perceptron(), half, jax.random.fold_in(key, number), scale)
        for number, half in enumerate(np.split(np.asarray(words), 2))
    ]
    np.testing.assert_allclose(step(words, key=key, scale=scale), sum(losses) / 2, rtol=1e-12)
    ud.shutdown()


def test_what_it_cannot_do_is_refused(jax_pools: PartPools) -> None:
    jax_pools.get(2).run(refuse)


def refuse() -> None:
    ud.init()
    optimizer, words = optax.sgd(0.1), jnp.zeros((BATCH, TOKENS), int)
    chained = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
    with pytest.raises(UsageError, match="all parameters together"):
        ud.TrainStep(perceptron_loss, perceptron(), chained, strategy="pipeline=2")
    with pytest.raises(ConfigurationError, match=r"runs the forward and backward passes itself"):
        ud.distribute(perceptron(), optimizer, strategy="pipeline=2")
    with pytest.raises(ConfigurationError, match="not for JAX"):
        ud.TrainStep(perceptron_loss, perceptron(), optimizer, strategy="pipeline=2:balance=time:split=layer2")
    with pytest.raises(UsageError, match="Return the loss alone"):
        ud.TrainStep(perceptron_loss, perceptron(), optimizer, strategy="pipeline=2", has_aux=True)
    with pytest.raises(ConfigurationError, match="the model divided by pipeline"):
        ud.TrainStep(perceptron_loss, perceptron(), optimizer, strategy="pipeline=2", elastic=True)
    step = ud.TrainStep(perceptron_loss, perceptron(), optimizer, strategy="pipeline=2")
    with pytest.raises(UsageError, match="must be called with the same"):
        step(words + ud.rank())
    np.testing.assert_allclose(step(words), perceptron_loss(perceptron(), words))
    ud.shutdown()
    for loss, batch, strategy, error, message in (
        (in_a_scan, (words,), "", ConfigurationError, "can be cut into no more than 1"),
        (perceptron_loss, (words,), ":split=layer2+layer3", ConfigurationError, "names 2 places"),
        (perceptron_loss, (words,), ":split=layer9", ConfigurationError, "no parameter .* under 'layer9'"),
        (perceptron_loss, (words,), ":split=layer0", ConfigurationError, "or begins with them"),
        (with_exchange, (words,), "", UsageError, "effects besides"),
        (
            lambda params, words: params["layer0"].sum(),
            (words,),
            "",
            UsageError,
            "must depend on parameters and on the",
        ),
        (lambda params, x, y: (params["layer0"] * x).sum(), (words, words[1:]), "", UsageError, "Give others by name"),
        (lambda params, x: x @ params["layer0"], (words / 2,), "", UsageError, "the mean loss over the samples"),
        (different, (words,), "", (UsageError, PeerLostError), "trace different losses|could not go on"),
        (
            failing,
            (words,),
            "",
            (ZeroDivisionError, PeerLostError),
            "on rank 1|rank 1 .* could not go on: ZeroDivision",
        ),
    ):
        ud.init()
        step = ud.TrainStep(loss, perceptron(), optimizer, strategy=f"pipeline=2{strategy}")
        with pytest.raises(error, match=message):
            step(*batch)
        ud.shutdown()


def in_a_scan(params: Any, words: Any) -> Any:
    kernels = jnp.stack(list(params.values()))
    return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), words / WORDS, kernels)[0].mean()


def with_exchange(params: Any, words: Any) -> Any:
    return perceptron_loss(params, words) + ud.allreduce(params["layer0"].sum(), name="sum")


def failing(params: Any, words: Any) -> Any:
    if ud.rank():
        raise ZeroDivisionError("on rank 1")
    return perceptron_loss(params, words)


def different(params: Any, words: Any) -> Any:
    return perceptron_loss(params, words) * (1.0 if ud.rank() else 2.0 * jnp.ones(3).sum())


def test_a_short_window_is_applied_by_flush(jax_pools: PartPools) -> None:
    jax_pools.get(2).run(flush_a_short_window)


def flush_a_short_window() -> None:
    ud.init()
    words = jax.random.randint(jax.random.key(1), (BATCH, TOKENS), 0, WORDS)
    found = []
    for strategy in ("pipeline=2:microbatches=2,accumulate=2", "pipeline=2:microbatches=2"):
        step = ud.TrainStep(perceptron_loss, perceptron(), optax.sgd(0.1), strategy=strategy)
        step(words)
        assert step.flush() is ("accumulate" in strategy)
        found.append(step.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), *found)
    ud.shutdown()
