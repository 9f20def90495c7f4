"""`precision=bf16:states=bf16` in JAX: the numbers of one process with the same types, whatever divides the state."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from part_pools import PartPools

jax = pytest.importorskip("jax", reason="the training is in JAX")

import jax.numpy as jnp  # noqa: E402 - after JAX is known to be there
import optax  # noqa: E402 - it needs JAX
import weights_jax  # noqa: E402 - it needs JAX

import unidist.jax as ud  # noqa: E402 - it needs JAX
from unidist.buffer import DType  # noqa: E402
from unidist.gradients.precision import Precision, Rounding  # noqa: E402
from unidist_jax.optimizer.narrow_optimizer import kept_narrow  # noqa: E402 - it needs JAX

pytestmark = pytest.mark.parallel

STEPS, BATCH = 6, 12
STATES = "precision=bf16:states=bf16"
LINES = (STATES, f"zero=1,{STATES}", f"zero=2,{STATES}", f"zero=3:bucket_mb=0.001,{STATES}")


def parameters() -> Any:
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray((0.3 * generator.standard_normal(shape)).astype(np.float32))

    return {"first": {"kernel": normal(16, 41), "bias": normal(41)}, "second": normal(41, 5), "scale": normal()}


def loss(params: Any, x: Any, y: Any) -> Any:
    outputs = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"]) @ params["second"] * params["scale"]
    return jnp.mean(jnp.sum((outputs - y).astype(jnp.float32) ** 2, axis=-1))


def batches() -> list[tuple[Any, Any]]:
    generator = np.random.default_rng(1)
    shapes = ((BATCH, 16), (BATCH, 5))
    return [tuple(generator.standard_normal(shape).astype(np.float32) for shape in shapes) for _ in range(STEPS)]


def share(batch: tuple[Any, ...], rank: int, size: int) -> tuple[Any, ...]:
    return tuple(part[rank::size] for part in batch)


def optimizer() -> Any:
    return optax.adamw(optax.linear_schedule(0.02, 0.01, 10))


def train(strategy: str) -> tuple[list[float], list[Any], set[str], set[str]]:
    """Return the losses, the parameters, and the types of parameters and of state that is like them."""
    ud.init()
    try:
        step = ud.TrainStep(loss, parameters(), optimizer(), strategy)
        losses = [step(*share(batch, ud.rank(), ud.size())).item() for batch in batches()]
        step.flush()
        leaves = jax.tree.leaves(step.params)
        kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(step.opt_state) if leaf.dtype != jnp.int32}
        return losses, [np.asarray(leaf, np.float32) for leaf in leaves], {str(leaf.dtype) for leaf in leaves}, kinds
    finally:
        ud.shutdown()


def alone(size: int, *, passes: int = 1, rounding: Rounding = Rounding.STOCHASTIC) -> tuple[list[float], list[Any]]:
    """Do the same in one process without an exchange: each share's gradients, added up in bfloat16."""
    kind = DType.BFLOAT16
    number = itertools.count(1)
    held = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), parameters())
    plain = optimizer()

    def narrow(count: Any) -> Any:
        return kept_narrow(plain, Precision(kind, kind, kind, rounding=rounding), lambda: count)

    @jax.jit
    def of_share(params: Any, x: Any, y: Any) -> Any:
        return jax.value_and_grad(loss)(params, x.astype(jnp.bfloat16), y.astype(jnp.bfloat16))

    @jax.jit
    def update(params: Any, state: Any, gradients: Any, count: Any) -> Any:
        updates, state = narrow(count).update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state, losses, sums = narrow(np.uint32(0)).init(held), [], None
    for turn, batch in enumerate(batches(), 1):
        found = [of_share(held, *share(batch, rank, size)) for rank in range(size)]
        losses.append(float(np.mean([value.item() for value, _ in found])))
        for _, gradients in found:
            sums = gradients if sums is None else jax.tree.map(jnp.add, sums, gradients)
        if turn % passes == 0:
            mean = jax.tree.map(lambda leaf: leaf / (size * passes), sums)
            held, state = update(held, state, mean, np.uint32(next(number)))
            sums = None
    return losses, [np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(held)]


@pytest.mark.parametrize("rounding", list(Rounding))
def test_every_division_has_the_numbers_of_one_process(jax_pools: PartPools, rounding: Rounding) -> None:
    pool = jax_pools.get(2, engine="shm")
    (expected,) = jax_pools.get(1).run(alone, (2,), {"rounding": rounding})
    for line in LINES:
        for losses, params, *types in pool.run(train, (f"{line}:rounding={rounding}",)):
            assert types == [{"bfloat16"}, {"bfloat16"}], line
            np.testing.assert_allclose(losses, expected[0], rtol=1e-6, err_msg=line)
            for one, other in zip(params, expected[1], strict=True):
                np.testing.assert_array_equal(one, other, err_msg=line)


def test_stochastic_rounding_is_nearer_to_float32(jax_pools: PartPools) -> None:
    """And rounding changes the numbers: else the tests above would show nothing."""
    pool = jax_pools.get(1)
    ((losses, *_),) = pool.run(train, (STATES,))
    ((nearest, *_),) = pool.run(train, (f"{STATES}:rounding=nearest",))
    ((wide, *_),) = pool.run(train, ("data",))
    assert losses != nearest
    np.testing.assert_allclose(losses, wide, rtol=0.02)


@pytest.mark.parametrize("line", LINES[::2])
def test_windows_of_several_passes(jax_pools: PartPools, line: str) -> None:
    (expected,) = jax_pools.get(1).run(alone, (2,), {"passes": 2})
    for losses, params, *_ in jax_pools.get(2, engine="shm").run(train, (f"{line},accumulate=2",)):
        np.testing.assert_allclose(losses, expected[0], rtol=1e-2)  # sums of passes are rounded in another order
        for one, other in zip(params, expected[1], strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=2.0**-6)


def on_a_gpt(line: str) -> tuple[list[float], set[str], float]:
    """Return the losses, the types of the parameters, and how far they differ between ranks."""
    ud.init()
    try:
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights_jax.params())
        step = ud.TrainStep(weights_jax.loss_fn, params, optax.adam(0.01), line)
        given = [[part.astype(np.int32) for part in weights_jax.batch(turn, 0, has_empty=False)] for turn in range(6)]
        losses = [step(*batch).item() for batch in given]
        leaves = [leaf.astype(jnp.float32) for leaf in jax.tree.leaves(step.params)]
        apart = max(float(jnp.abs(ud.allreduce(leaf, op=ud.Max) - leaf).max()) for leaf in leaves)
        return losses, {str(leaf.dtype) for leaf in jax.tree.leaves(step.params)}, apart
    finally:
        ud.shutdown()


def test_it_composes_with_tensor(jax_pools: PartPools) -> None:
    """Divided arrays are rounded by other numbers than in one process; ranks agree on the others."""
    (wanted,) = jax_pools.get(1).run(on_a_gpt, (STATES,))
    line = f"tensor=2:plan={weights_jax.PLAN},{STATES}"
    for losses, kinds, apart in jax_pools.get(2, engine="shm").run(on_a_gpt, (line,)):
        np.testing.assert_allclose(losses, wanted[0], rtol=0.02)
        assert kinds == {"bfloat16"}
        assert apart == 0


def resume(saving: str, loading: str, folder: str) -> tuple[bool, str]:
    """Save in the middle; return whether another step goes on from there exactly, and its type of state."""
    ud.init()
    try:

        def made(strategy: str) -> Any:
            return ud.TrainStep(loss, jax.tree.map(jnp.ones_like, parameters()), optimizer(), strategy)

        own = [share(batch, ud.rank(), ud.size()) for batch in batches()]
        step = made(saving)
        for batch in own[:3]:
            step(*batch)
        ud.save(folder, step)
        again = made(loading)
        ud.load(folder, again)
        kind = next(leaf.dtype for leaf in jax.tree.leaves(again.opt_state) if leaf.dtype != jnp.int32)
        return [step(*batch).item() for batch in own[3:]] == [again(*batch).item() for batch in own[3:]], str(kind)
    finally:
        ud.shutdown()


@pytest.mark.parametrize(("saving", "loading"), [(LINES[0], LINES[2]), (LINES[3], LINES[0]), (LINES[1], LINES[1])])
def test_resuming_is_exact_whatever_divides_the_state(
    jax_pools: PartPools, tmp_path: Path, saving: str, loading: str
) -> None:
    for is_exact, _ in jax_pools.get(2, engine="shm").run(resume, (saving, loading, str(tmp_path / "saved"))):
        assert is_exact


@pytest.mark.parametrize(("saving", "loading"), [("data", LINES[0]), (LINES[2], "data")])
def test_a_checkpoint_fits_a_run_of_the_other_type(
    jax_pools: PartPools, tmp_path: Path, saving: str, loading: str
) -> None:
    for _, kind in jax_pools.get(2, engine="shm").run(resume, (saving, loading, str(tmp_path / "saved"))):
        assert kind == ("float32" if loading == "data" else "bfloat16")
