"""ZeRO in JAX gives the numbers of one process, with pieces of the optimizer state on each rank."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from part_pools import PartPools

from unidist.errors import ConfigurationError, UsageError
from unidist.testing import StrategyConformance

jax = pytest.importorskip("jax", reason="the training is in JAX")

import jax.numpy as jnp  # noqa: E402 - after JAX is known to be there
import optax  # noqa: E402 - it needs JAX

import unidist.jax as ud  # noqa: E402 - it needs JAX

pytestmark = pytest.mark.parallel

STEPS, BATCH = 6, 12


@pytest.fixture(scope="module")
def rank_pools(jax_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return jax_pools


class JaxConformance(StrategyConformance):
    framework = "jax"
    modes = ("jit", "eager", "step")
    sizes = (2,)


class TestZeroOne(JaxConformance):
    strategy = "zero=1"
    modes = ("jit", "step")
    sizes = (2, 3)


@pytest.mark.soak
class TestZeroOneAtOnce(JaxConformance):
    strategy = "zero=1"
    modes = ("eager",)
    optimizers = ("adamw",)


class TestZeroTwoAccumulating(JaxConformance):
    strategy = "zero=2,accumulate=2"
    passes = 2
    optimizers = ("adamw",)


# Optimizers beyond the conformance suite's


def clipped(limit: float) -> optax.GradientTransformation:
    """Return what the strategy clip_norm does, for one process."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        factor = jnp.minimum(1.0, limit / (optax.global_norm(updates) + 1e-6))
        return jax.tree.map(lambda update: update * factor, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def by_label() -> optax.GradientTransformation:
    """Return an optimizer that goes by the paths of leaves, and by their numbers of dimensions."""
    labels = {"first": {"kernel": "adam", "bias": "sgd"}, "second": {"kernel": "adam", "bias": "adam"}, "scale": "sgd"}
    several = optax.multi_transform({"adam": optax.adam(0.01), "sgd": optax.sgd(0.05, momentum=0.9)}, labels)
    decay = optax.add_decayed_weights(1e-3, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree))
    return optax.chain(several, decay)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adam": lambda: optax.adam(0.01),
    "adam, clipped": lambda: optax.chain(clipped(0.05), optax.adam(0.01)),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=4),
    "by label": by_label,
}


class Outcome(NamedTuple):
    """The result of a rank.

    Args:
        error: largest relative difference from one process.
        state_bytes: of the optimizer state.
        whole_bytes: of that of one process.
        flushed: there was a window to be flushed.
    """

    error: float
    state_bytes: int
    whole_bytes: int
    flushed: bool


def parameters() -> Any:
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(0.3 * generator.standard_normal(shape))

    return {
        "first": {"kernel": normal(16, 40), "bias": normal(40)},
        "second": {"kernel": normal(40, 5), "bias": normal(5)},
        "scale": normal(),
    }


def loss(params: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"])
    out = (hidden @ params["second"]["kernel"] + params["second"]["bias"]) * params["scale"]
    return jnp.mean(jnp.sum((out - y) ** 2, axis=-1))


def train(strategy: str, optimizer: str, alone: str, passes: int, steps: int) -> Outcome:
    """Train on this rank's samples, and on all samples by optax alone."""
    generator = np.random.default_rng(1)
    x, y = generator.standard_normal((steps, BATCH, 16)), generator.standard_normal((steps, BATCH, 5))
    ud.init()
    try:
        step = ud.TrainStep(loss, parameters(), OPTIMIZERS[optimizer](), strategy)
        each = BATCH // ud.size()
        own = slice(ud.rank() * each, (ud.rank() + 1) * each)
        for i in range(steps):
            step(x[i, own], y[i, own])
        flushed = step.flush()
        found, state = step.params, step.opt_state
    finally:
        ud.shutdown()
    params, plain = parameters(), OPTIMIZERS[alone]()
    whole = plain.init(params)
    for i in range(0, steps, passes):
        window = slice(i, min(i + passes, steps))
        gradients = jax.grad(loss)(params, x[window].reshape(-1, 16), y[window].reshape(-1, 5))
        updates, whole = plain.update(gradients, whole, params)
        params = optax.apply_updates(params, updates)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True)
    error = max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (state, whole)]
    return Outcome(error, *sizes, flushed)


@pytest.mark.parametrize(
    ("size", "strategy", "optimizer", "alone", "share"),
    [
        (2, "zero=1,clip_norm=0.05", "adam", "adam, clipped", 0.6),
        pytest.param(3, "zero=2,clip_norm=0.05", "adam", "adam, clipped", 0.45, marks=pytest.mark.soak),
        (2, "zero=1:whole=true:bucket_mb=0.001", "adam", "adam", 0.8),
        (2, "zero=1", "by label", "by label", 0.6),
        pytest.param(2, "zero=2", "adafactor", "adafactor", 0.95, marks=pytest.mark.soak),
        pytest.param(4, "zero=2:shard=2", "adam", "adam", 0.6, marks=pytest.mark.soak),
    ],
)
def test_ranks_with_pieces_of_the_state_get_the_numbers_of_one_process(
    size: int, strategy: str, optimizer: str, alone: str, share: float, jax_pools: PartPools
) -> None:
    for outcome in jax_pools.get(size, engine="shm").run(train, (strategy, optimizer, alone, 1, STEPS)):
        assert outcome.error < 1e-12
        assert outcome.state_bytes < share * outcome.whole_bytes


@pytest.mark.parametrize("strategy", ["zero=1,accumulate=3", "zero=2,accumulate=3"])
def test_a_window_that_was_cut_short_is_flushed(strategy: str, jax_pools: PartPools) -> None:
    for outcome in jax_pools.get(2, engine="shm").run(train, (strategy, "adam", "adam", 3, 5)):
        assert outcome.flushed
        assert outcome.error < 1e-12


# In one process


@pytest.fixture
def _runtime() -> Iterator[None]:
    ud.init()
    yield
    ud.shutdown()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("zero=3", "the script computes the loss.*TrainStep.*zero=2"),
        ("zero=1:offload=host", "offload=host does not work with jax"),
        ("zero=2:shared=true", "shared=true does not work with jax"),
    ],
)
@pytest.mark.usefixtures("_runtime")
def test_what_is_for_other_frameworks_is_refused(line: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ud.distribute({"w": jnp.zeros(3)}, optax.sgd(0.1), line)


@pytest.mark.usefixtures("_runtime")
def test_a_global_norm_in_a_chain_is_refused_where_the_state_is_made() -> None:
    plain = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    params, optimizer = ud.distribute({"a": jnp.zeros(3), "b": jnp.zeros((2, 2))}, plain, "zero=1")
    with pytest.raises(UsageError, match=r"all parameters together.*clip_norm"):
        optimizer.init(params)


@pytest.mark.usefixtures("_runtime")
def test_updates_of_another_type_than_the_gradients_keep_it() -> None:
    widen = optax.stateless(lambda updates, params: jax.tree.map(lambda leaf: leaf.astype(jnp.float32) / 3, updates))
    params, optimizer = ud.distribute({"w": jnp.ones(5, jnp.bfloat16)}, widen, "zero=2")
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    np.testing.assert_array_equal(updates["w"], np.ones(5, np.float32) / 3)


def release() -> bool:
    """Drop an optimizer that a compiled function was made with; return whether its exchange is gone."""
    ud.init()
    try:

        def trained() -> weakref.ref[Any]:
            params, optimizer = ud.distribute({"w": jnp.ones(3)}, optax.adam(0.1), "zero=2")
            update = jax.jit(optimizer.update)
            update(params, optimizer.init(params), params)
            return weakref.ref(optimizer.binding.leaves(params).fused)

        exchange = trained()
        jax.clear_caches()
        gc.collect()
        ud.distribute({"w": jnp.ones(3)}, optax.adam(0.1))  # releases what was abandoned
        gc.collect()
        return exchange() is None
    finally:
        ud.shutdown()


def test_an_optimizer_that_is_no_more_leaves_no_exchange_behind(jax_pools: PartPools) -> None:
    assert jax_pools.get(1).run(release) == [True]
