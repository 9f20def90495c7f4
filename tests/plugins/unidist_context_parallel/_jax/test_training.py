"""Context parallelism in JAX gives the numbers of one process, and says what it cannot do."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from part_pools import PartPools

from unidist.errors import ConfigurationError, UsageError

jax = pytest.importorskip("jax", reason="the training is in JAX")

import jax.numpy as jnp  # noqa: E402 - after JAX is known to be there
import optax  # noqa: E402 - it needs JAX

import unidist.jax as ud  # noqa: E402

pytestmark = pytest.mark.parallel

BATCH, TOKENS, WIDTH, WORDS, HEADS, FEW, STEPS = 4, 24, 24, 11, 6, 3, 2


def written_out(q: Any, k: Any, v: Any, *, mask: Any, **options: Any) -> Any:
    """Return attention in float64: the softmax of JAX's own function is always in float32."""
    groups = q.shape[2] // k.shape[2]
    scores = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, groups, 2)) * options.get("scale", q.shape[-1] ** -0.5)
    rows, columns = jnp.arange(q.shape[1])[:, None], jnp.arange(q.shape[1])[None]
    seen = columns <= rows if options.get("is_causal") else jnp.ones((q.shape[1], q.shape[1]), bool)
    if "local_window_size" in options:
        seen = seen & (abs(rows - columns) <= options["local_window_size"][0])
    seen = seen if mask is None else seen & mask
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e300), -1)
    return jnp.einsum("bnts,bsnh->btnh", weights, jnp.repeat(v, groups, 2))


PLAIN = SimpleNamespace(
    split=lambda batch, dim=1: batch,
    positions=jnp.arange,
    attention=written_out,
    mean=lambda values, where=None: (
        jnp.sum(values * (1 if where is None else where)) / (values.size if where is None else jnp.sum(where))
    ),
    whole=lambda array, dim=1: array,
)
"""What a script without unidist has in place of `ud.context`."""

OF_JAX = SimpleNamespace(**{**vars(PLAIN), "attention": jax.nn.dot_product_attention})
"""The same with JAX's own attention, which `exchange=gather` uses, too."""


@pytest.fixture(scope="module")
def rank_pools(jax_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return jax_pools


def model() -> dict[str, Any]:
    """Return parameters: words, positions that are learned, and a layer of attention."""
    generator = np.random.default_rng(0)

    def some(*shape: int) -> Any:
        return jnp.asarray(generator.normal(size=shape) * 0.3)

    width = WIDTH // HEADS
    layer = lambda: {  # noqa: E731 - one line
        "q": some(WIDTH, HEADS, width), "k": some(WIDTH, FEW, width), "v": some(WIDTH, FEW, width),
        "out": some(HEADS, width, WIDTH), "up": some(WIDTH, 30), "down": some(30, WIDTH),
    }  # fmt: skip
    return {"words": some(WORDS, WIDTH), "places": some(TOKENS, WIDTH), "layers": [layer()]}


def batches() -> list[tuple[Any, Any, Any]]:
    """Return tokens, labels and lengths of each step."""
    generator = np.random.default_rng(1)
    return [
        (
            generator.integers(0, WORDS, (BATCH, TOKENS)).astype(np.int32),
            generator.integers(0, WORDS, (BATCH, TOKENS)).astype(np.int32),
            generator.integers(5, TOKENS, BATCH).astype(np.int32),
        )
        for _ in range(STEPS)
    ]


def rotated(x: Any, places: Any) -> Any:
    """Return queries or keys with rotary positions."""
    angles = places[:, None] * jnp.asarray(0.3 ** np.arange(x.shape[-1] // 2))
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    one, other = jnp.split(x, 2, -1)
    return jnp.concatenate([one * cos - other * sin, one * sin + other * cos], -1)


def loss_of(context: Any, *, options: dict[str, Any], pads: bool, remat: bool) -> Callable[..., Any]:
    """Return a loss function of a model that computes its share of each sequence."""

    def block(x: Any, layer: Any, places: Any, mask: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, layer[name]) for name in "qkv")
        found = context.attention(rotated(q, places), rotated(k, places), v, mask=mask, **options)
        x = x + jnp.einsum("btnh,nhd->btd", found, layer["out"])
        return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]

    def loss(params: Any, tokens: Any, labels: Any, lengths: Any) -> Any:
        seen = jnp.arange(tokens.shape[1])[None] >= tokens.shape[1] - lengths[:, None]  # padding in front
        mask = seen[:, None, None, :] if pads else None
        places = context.positions(tokens.shape[1])
        tokens, labels, counts = context.split((tokens, labels, seen))
        x = params["words"][tokens] + params["places"][places]
        for layer in params["layers"]:
            x = (jax.checkpoint(block) if remat else block)(x, layer, places, mask)
        logits = x @ params["words"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        size = context.whole(x).var()  # of all tokens
        return context.mean(losses, where=counts if pads else None) + 0.1 * size

    return loss


CASES: list[tuple[str, dict[str, Any], bool, bool]] = [
    ("context=2,zero=1", {"is_causal": True}, True, True),
    ("context=2:exchange=gather", {"is_causal": True, "local_window_size": (5, 5)}, True, False),
    ("context=2:exchange=ulysses", {"is_causal": True}, True, False),
    ("context=2,zero=3", {"local_window_size": (7, 7), "scale": 0.4}, False, False),
]


def trained(strategy: str, options: dict[str, Any], pads: bool, remat: bool) -> None:
    """Train on the ranks and in one process, and compare."""
    ud.init()
    loss_fn = loss_of(ud.context, options=options, pads=pads, remat=remat)
    step = ud.TrainStep(loss_fn, model(), optax.sgd(0.1, momentum=0.9), strategy=strategy)
    wanted = model()
    optimizer = optax.sgd(0.1, momentum=0.9)
    state = optimizer.init(wanted)
    plain = OF_JAX if "gather" in strategy else PLAIN
    function = jax.jit(jax.value_and_grad(loss_of(plain, options=options, pads=pads, remat=False)))
    for batch in batches():
        size = ud.data_size()
        own = [each[ud.data_rank() * BATCH // size : (ud.data_rank() + 1) * BATCH // size] for each in batch]
        loss = step(*own)
        expected, gradients = function(wanted, *batch)
        updates, state = optimizer.update(gradients, state, wanted)
        before, wanted = wanted, optax.apply_updates(wanted, updates)
        if size == 1 or not pads:
            np.testing.assert_allclose(float(loss), float(expected), rtol=0, atol=1e-12)
        if size > 1:
            continue
        for one, other, first in zip(*map(jax.tree.leaves, (step.params, wanted, before)), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
            assert np.abs(one - first).max() > 1e-3
    ud.shutdown()


@pytest.mark.parametrize(("strategy", "options", "pads", "remat"), CASES, ids=[case[0] for case in CASES])
def test_shares_train_like_whole_sequences(
    jax_pools: PartPools, strategy: str, options: dict[str, Any], pads: bool, remat: bool
) -> None:
    jax_pools.get(2, engine="shm").run(trained, (strategy, options, pads, remat))


@pytest.mark.parametrize(
    "strategy", ["context=3", *(pytest.param(each, marks=pytest.mark.soak) for each in ("context=4", "context=2"))]
)
def test_on_more_ranks(jax_pools: PartPools, strategy: str) -> None:
    jax_pools.get(3 if strategy == "context=3" else 4, engine="shm").run(
        trained, (strategy, {"is_causal": True}, False, False)
    )


def averaged() -> None:
    """Average what is no number where it does not count, and more than 16 bits can count."""
    ud.init()
    values = jnp.where(jnp.arange(1000) < 300, jnp.nan, jnp.linspace(0, 1, 1000)).astype(jnp.bfloat16)
    found = ud.context.mean(values, where=jnp.arange(1000) >= 300)
    assert found.dtype == jnp.bfloat16
    assert float(found) == float(jnp.mean(values[300:]))
    ud.shutdown()


def test_a_mean_leaves_out_what_does_not_count(jax_pools: PartPools) -> None:
    jax_pools.get(1).run(averaged)


def refused() -> None:
    ud.init()
    params = {"w": jnp.ones((4, 4))}

    def loss(params: Any, x: Any) -> Any:
        q = (x @ params["w"])[:, :, None]
        return ud.context.mean(ud.context.attention(q, q, q))

    with pytest.raises(ConfigurationError, match=r"ud\.context\.split"):
        ud.TrainStep(loss, params, optax.sgd(0.1), strategy="context=2:dim=0")
    step = ud.TrainStep(loss, params, optax.sgd(0.1), strategy="context=2")
    with pytest.raises(UsageError, match=r"Divide the batch by ud\.context\.split"):
        step(jnp.ones((2, 8, 4)))
    with pytest.raises(UsageError, match="Pad it to 3 times 4"):
        ud.context.split(np.ones((2, 9)))
    with pytest.raises(UsageError, match="got different inputs"):
        ud.context.split(np.full((2, 8), ud.rank()))
    own = ud.context.split(np.arange(16.0).reshape(1, 8, 2))
    assert own.shape == (1, 4, 2)
    with pytest.raises(UsageError, match=r"call jax\.nn\.dot_product_attention"):
        ud.context.attention(own[:, :, None], own[:, :2, None], own[:, :2, None])
    with pytest.raises(UsageError, match="a mask float"):
        ud.context.attention(*[own[:, :, None]] * 3, mask=jnp.zeros((8, 8)))
    with pytest.raises(UsageError, match="as wide on both sides"):
        ud.context.attention(*[own[:, :, None]] * 3, local_window_size=(1, 2))
    np.testing.assert_array_equal(ud.context.whole(own), np.arange(16.0).reshape(1, 8, 2))
    with pytest.raises(UsageError, match="exchange in one way"):
        ud.TrainStep(loss, params, optax.sgd(0.1), strategy="context=2:exchange=gather")
    ud.shutdown()


def test_what_cannot_be_is_said(jax_pools: PartPools) -> None:
    jax_pools.get(2, engine="shm").run(refused)
