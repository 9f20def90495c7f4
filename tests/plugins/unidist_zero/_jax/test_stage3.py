"""ZeRO stage 3 in JAX: the numbers of one process, with pieces of the parameters on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from part_pools import PartPools

from unidist.errors import ConfigurationError, MismatchError, UsageError
from unidist.testing import StrategyConformance

jax = pytest.importorskip("jax", reason="the training is in JAX")

import jax.numpy as jnp  # noqa: E402 - after JAX is known to be there
import optax  # noqa: E402 - it needs JAX

import unidist.jax as ud  # noqa: E402 - it needs JAX

pytestmark = pytest.mark.parallel

STEPS, BATCH, WIDTH, LAYERS = 5, 12, 24, 4
SMALL = "zero=3:bucket_mb=0.005"  # 24 * 24 * 8 bytes: a layer


@pytest.fixture(scope="module")
def rank_pools(jax_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return jax_pools


class JaxConformance(StrategyConformance):
    framework = "jax"
    modes = ("step",)
    sizes = (2,)


class TestZeroThree(JaxConformance):
    strategy = "zero=3:bucket_mb=0.0001"
    sizes = (1, 2, 3)


class TestZeroThreeAccumulating(JaxConformance):
    strategy = "zero=3,accumulate=2"
    passes = 2
    optimizers = ("adamw",)


def clipped(limit: float) -> optax.GradientTransformation:
    """Return what the strategy clip_norm does, for one process."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        factor = jnp.minimum(1.0, limit / (optax.tree.norm(updates) + 1e-6))
        return jax.tree.map(lambda update: update * factor, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "momentum": lambda: optax.sgd(0.002, momentum=0.9),
    "adamw": lambda: optax.adamw(0.01),
    "adamw, clipped": lambda: optax.chain(clipped(0.05), optax.adamw(0.01)),
    "lamb": lambda: optax.lamb(0.01),
}


def parameters() -> Any:
    """Return parameters that are used in another order than that of their names, and twice."""
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray(0.3 * generator.standard_normal(shape))

    layers = [{"kernel": normal(WIDTH, WIDTH), "bias": normal(WIDTH)} for _ in range(LAYERS)]
    return {
        "layers": layers,
        "a head": normal(WIDTH),
        "z first": normal(6, WIDTH),
        "unused": normal(3),
        "scale": normal(),
    }


def loss(params: Any, x: Any, y: Any, factor: float = 1.0) -> Any:
    h = jax.nn.silu(x @ params["z first"])
    for layer in params["layers"]:
        h = h + jnp.tanh(h @ layer["kernel"].T + layer["bias"])
    outputs = (h @ params["a head"]) * params["scale"] + jnp.sum(h @ params["z first"].T, -1)
    return jnp.mean((outputs - y) ** 2) * factor


def batches() -> list[tuple[Any, Any]]:
    generator = np.random.default_rng(1)
    return [(generator.standard_normal((BATCH, 6)), generator.standard_normal(BATCH)) for _ in range(STEPS)]


class Outcome(NamedTuple):
    """The result of a rank.

    Args:
        error: largest relative difference of a parameter from one process.
        loss_error: likewise of the losses.
        held: bytes of parameters and optimizer state between two steps, relative to those of one process.
        flushed: there was a window to be flushed.
    """

    error: float
    loss_error: float
    held: float
    flushed: bool


def train(strategy: str, optimizer: str, alone: str, passes: int) -> Outcome:
    """Train on this rank's samples, and on all samples by optax alone."""
    data = batches()
    ud.init()
    try:
        step = ud.TrainStep(loss, parameters(), OPTIMIZERS[optimizer](), strategy)
        each = BATCH // ud.size()
        own = slice(ud.rank() * each, (ud.rank() + 1) * each)
        losses = [step(x[own], y[own]).item() for x, y in data]
        flushed = step.flush()
        losses.append(step.evaluate(*(part[own] for part in data[0])).item())
        held = sum(leaf.nbytes for leaf in jax.tree.leaves((step._held, step.opt_state)))
        found = step.params
        step.params = found  # as after loading
        losses.append(step.evaluate(*(part[own] for part in data[0])).item())
    finally:
        ud.shutdown()
    params, plain = parameters(), OPTIMIZERS[alone]()
    whole = plain.init(params)
    wanted = []
    for i in range(0, STEPS, passes):
        window = data[i : i + passes]
        wanted += [loss(params, x, y) for x, y in window]
        x, y = (np.concatenate(parts) for parts in zip(*window, strict=True))
        updates, whole = plain.update(jax.grad(loss)(params, x, y), whole, params)
        params = optax.apply_updates(params, updates)
    wanted += [loss(params, *data[0])] * 2
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True)
    error = max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)
    loss_error = max(abs(found / value - 1) for found, value in zip(losses, wanted, strict=True))
    everything = sum(leaf.nbytes for leaf in jax.tree.leaves((params, whole)))
    return Outcome(error, float(loss_error), held / everything, flushed)


@pytest.mark.parametrize(
    ("size", "strategy", "optimizer", "alone", "passes", "share"),
    [
        (2, SMALL, "momentum", "momentum", 1, 0.55),
        (3, SMALL + ",clip_norm=0.05", "adamw", "adamw, clipped", 1, 0.4),
        (2, SMALL + ",accumulate=2", "adamw", "adamw", 2, 0.55),
        (2, "zero=3", "lamb", "lamb", 1, 0.75),
        pytest.param(3, SMALL, "lamb", "lamb", 1, 0.6, marks=pytest.mark.soak),
        pytest.param(4, SMALL + ":shard=2,clip_norm=0.05", "adamw", "adamw, clipped", 1, 0.55, marks=pytest.mark.soak),
    ],
)
def test_ranks_with_pieces_of_everything_get_the_numbers_of_one_process(
    size: int, strategy: str, optimizer: str, alone: str, passes: int, share: float, jax_pools: PartPools
) -> None:
    for outcome in jax_pools.get(size, engine="shm").run(train, (strategy, optimizer, alone, passes)):
        assert outcome.error < 1e-12
        assert outcome.loss_error < 1e-12
        assert outcome.held < share
        assert outcome.flushed == (passes > 1)


def normalised(params: Any, x: Any, y: Any, mean: Callable[[Any], Any]) -> Any:
    """Return a loss with a normalisation over the samples of all ranks, and recomputed layers."""

    @jax.checkpoint
    def layer(h: Any, own: Any) -> Any:
        h = h @ own["kernel"] + own["bias"]
        return jnp.tanh(h - mean(jnp.mean(h, axis=0)))

    h = x @ params["z first"]
    for own in params["layers"]:
        h = layer(h, own)
    return jnp.mean((h @ params["a head"] - y) ** 2)


def train_normalised() -> float:
    """Return the difference of the parameters from those of one process, relative to the largest."""
    ud.init()
    try:
        step = ud.TrainStep(
            lambda params, x, y: normalised(params, x, y, ud.allreduce), parameters(), optax.sgd(0.01), SMALL
        )
        each = BATCH // ud.size()
        for batch in batches():
            step(*(part[ud.rank() * each : (ud.rank() + 1) * each] for part in batch))
        found = step.params
    finally:
        ud.shutdown()
    params = parameters()
    for x, y in batches():
        gradients = jax.grad(normalised)(params, x, y, lambda value: value)
        params = jax.tree.map(lambda leaf, gradient: leaf - 0.01 * gradient, params, gradients)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)


def test_the_loss_may_have_collectives_and_recompute_layers(jax_pools: PartPools) -> None:
    assert max(jax_pools.get(2, engine="shm").run(train_normalised)) < 1e-12


def narrow(strategy: str) -> tuple[list[float], list[Any], str]:
    """Train in 16 bits; returns the losses, the parameters and their type."""
    ud.init()
    try:
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), parameters())
        step = ud.TrainStep(loss, params, optax.adamw(0.01), strategy)
        each = BATCH // ud.size()
        own = slice(ud.rank() * each, (ud.rank() + 1) * each)
        losses = [step(*(part[own].astype(np.float32) for part in batch)).item() for batch in batches()]
        leaves = jax.tree.leaves(step.params)
        return losses, [np.asarray(leaf, np.float32) for leaf in leaves], str(leaves[0].dtype)
    finally:
        ud.shutdown()


@pytest.mark.parametrize("line", ["precision=bf16", "precision=fp16:reduce=fp32,clip_norm=0.1"])
def test_in_16_bits_it_does_what_zero_2_does(line: str, jax_pools: PartPools) -> None:
    pool = jax_pools.get(2, engine="shm")
    for (losses, leaves, dtype), (wanted, expected, _) in zip(
        pool.run(narrow, (f"{SMALL},{line}",)), pool.run(narrow, (f"zero=2,{line}",)), strict=True
    ):
        assert dtype in ("bfloat16", "float16")
        np.testing.assert_allclose(losses, wanted, rtol=0.02)
        for found, value in zip(leaves, expected, strict=True):
            np.testing.assert_allclose(found, value, atol=0.02 * np.abs(value).max())


def temporary_bytes(strategy: str) -> int:
    """Return the memory that XLA reserves for a step of 8 equal layers of 256 KiB, beside arguments and results."""
    ud.init()
    try:
        generator = np.random.default_rng(0)
        params = [jnp.asarray(generator.standard_normal((256, 256)).astype(np.float32)) for _ in range(8)]

        def deep(params: Any, x: Any) -> Any:
            for kernel in params:
                x = jnp.tanh(x @ kernel.T)
            return jnp.mean(x**2)

        step = ud.TrainStep(deep, params, optax.sgd(0.1), strategy)
        x = np.ones((2, 256), np.float32)
        program = step._run.lower(step._held, step.opt_state, None, None, (x,), {}).compile()
        step(x)  # every rank has traced it
        return int(program.memory_analysis().temp_size_in_bytes)
    finally:
        ud.shutdown()


def test_within_a_step_there_are_few_whole_layers(jax_pools: PartPools) -> None:
    pool = jax_pools.get(2, engine="shm")
    layer = 256 * 256 * 4
    # zero=2 has all gradients; zero=3 this rank's pieces of them, or a layer and its gradient.
    assert all(found > 8 * layer for found in pool.run(temporary_bytes, ("zero=2",)))
    assert all(found < 4.5 * layer for found in pool.run(temporary_bytes, ("zero=3:bucket_mb=0.3",)))


def calls() -> list[str]:
    """Return what a step of three layers calls, in order, and of which parameters."""
    from unidist_zero._jax import stage3_operations

    found: list[str] = []
    kept = {name: getattr(stage3_operations, name).run for name in ("GatherLeaves", "HandOver", "FinishPieces")}

    def recording(name: str) -> Any:
        def run(self: Any, operands: Any, results: Any) -> None:
            found.append(f"{name} {getattr(self, '_places', '')}")
            kept[name](self, operands, results)

        return run

    ud.init()
    for name in kept:
        getattr(stage3_operations, name).run = recording(name)
    try:
        step = ud.TrainStep(
            lambda params: jnp.mean(((jnp.ones((2, 8)) @ params[2]) @ params[0]) @ params[1]),
            [jnp.ones((8, 8))] * 3,
            optax.sgd(0.1),
            "zero=3:bucket_mb=0.0005",
        )
        step()
        return found
    finally:
        for name, run in kept.items():
            getattr(stage3_operations, name).run = run
        ud.shutdown()


def test_gradients_are_handed_over_while_the_backward_pass_gathers(jax_pools: PartPools) -> None:
    forward = ["GatherLeaves (2,)", "GatherLeaves (0,)", "GatherLeaves (1,)"]
    backward = ["HandOver (1,)", "GatherLeaves (0,)", "HandOver (0,)", "HandOver (2,)", "FinishPieces "]
    for found in jax_pools.get(2, engine="shm").run(calls):
        assert found == forward + backward  # the last one is still there, the first one's input is no parameter


def without_exchange() -> float:
    """Train where each rank gathers its own pieces alone; returns the difference from one process."""
    from unidist_zero._jax import stage3_operations

    def gather(self: Any, shards: Any, own: Any, leaves: Any) -> None:
        for place, leaf in leaves.items():
            piece = self.pieces[place]
            leaf.reshape(-1)[piece.start : piece.start + piece.count] = own[place].reshape(-1)[: piece.count]

    kept = stage3_operations.LeafExchange.gather_some
    stage3_operations.LeafExchange.gather_some = gather  # type: ignore[method-assign]
    try:
        return train(SMALL, "momentum", "momentum", 1).loss_error
    finally:
        stage3_operations.LeafExchange.gather_some = kept  # type: ignore[method-assign]


def test_the_numbers_need_the_gathering(jax_pools: PartPools) -> None:
    assert not all(error < 1e-9 for error in jax_pools.get(2, engine="shm").run(without_exchange))


def differ() -> list[str]:
    """Take another branch than the other rank; returns what the errors say."""
    found = []
    ud.init()
    try:
        params = [jnp.ones((16, 16)) for _ in range(4)]

        def forwards(params: Any, backwards: bool) -> Any:
            x = jnp.ones((2, 16))
            for kernel in reversed(params) if backwards else params:
                x = jnp.tanh(x @ kernel)
            return jnp.mean(x)

        step = ud.TrainStep(
            lambda params: forwards(params, ud.rank() == 1), params, optax.sgd(0.1), "zero=3:bucket_mb=0.002"
        )
        for call in (step, step.evaluate):
            try:
                call()
            except MismatchError as exc:
                found.append(str(exc))
    finally:
        ud.shutdown()
    return found


def test_ranks_that_use_parameters_in_different_orders_get_an_error(jax_pools: PartPools) -> None:
    for trained, evaluated in jax_pools.get(2, engine="shm").run(differ):
        assert "different orders" in trained
        assert "rank 0 '0', rank 1 '3'" in evaluated


def refused() -> list[str]:
    """Use zero=3 without TrainStep, and beyond its first step."""
    ud.init()
    try:
        found = []
        for error, call in (
            (ConfigurationError, lambda: ud.distribute({"w": jnp.ones(3)}, optax.sgd(0.1), "zero=3")),
            (UsageError, lambda: ud.distribute(optax.sgd(0.1), strategy="zero=3")),
        ):
            with pytest.raises(error) as raised:
                call()
            found.append(str(raised.value))
        return found
    finally:
        ud.shutdown()


def test_a_loop_of_the_scripts_own_is_told_to_use_the_step(jax_pools: PartPools) -> None:
    for first, second in jax_pools.get(1).run(refused):
        assert "TrainStep(loss_fn, params, optimizer)" in first
        assert "the model is changed by 'zero'" in second
