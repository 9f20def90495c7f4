"""`precision` in JAX: the numbers of a program with the same casts; where one rank overflows, none takes the step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from part_pools import PartPools

from unidist.errors import UsageError

jax = pytest.importorskip("jax", reason="the training is in JAX")

import jax.numpy as jnp  # noqa: E402 - after JAX is known to be there
import optax  # noqa: E402 - it needs JAX

import unidist.jax as ud  # noqa: E402 - it needs JAX

pytestmark = pytest.mark.parallel

STEPS, BATCH, RATE = 6, 12, 0.01
NARROW = {"bf16": jnp.bfloat16, "fp16": jnp.float16}


def parameters() -> Any:
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray((0.3 * generator.standard_normal(shape)).astype(np.float32))

    return {"first": {"kernel": normal(16, 40), "bias": normal(40)}, "second": normal(40, 5), "scale": normal()}


def loss(params: Any, x: Any, y: Any) -> Any:
    outputs = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"]) @ params["second"] * params["scale"]
    return jnp.mean(jnp.sum((outputs - y).astype(jnp.float32) ** 2, axis=-1))


def batches() -> list[tuple[Any, Any]]:
    generator = np.random.default_rng(1)
    shapes = ((BATCH, 16), (BATCH, 5))
    return [tuple(generator.standard_normal(shape).astype(np.float32) for shape in shapes) for _ in range(STEPS)]


def share(batch: tuple[Any, ...], rank: int, size: int) -> tuple[Any, ...]:
    each = BATCH // size
    return tuple(part[rank * each : (rank + 1) * each] for part in batch)


def train(strategy: str) -> tuple[list[float], list[Any], str]:
    """Return the losses, the parameters in the type in which they are updated, and the type of `params`."""
    ud.init()
    try:
        step = ud.TrainStep(loss, parameters(), optax.sgd(RATE), strategy)
        losses = [step(*share(batch, ud.rank(), ud.size())).item() for batch in batches()]
        leaves = jax.tree.leaves(step.params)
        return losses, [np.asarray(leaf, np.float32) for leaf in leaves], str(leaves[0].dtype)
    finally:
        ud.shutdown()


def expected(
    name: str, size: int, *, sharded: bool, scale: float, limit: float | None
) -> tuple[list[float], list[Any]]:
    """Do the same in one process: each share's loss in 16 bits, and their gradients added up."""
    dtype = NARROW[name]
    params = parameters()
    if sharded:  # masters begin with what the parameters are in 16 bits
        params = jax.tree.map(lambda leaf: leaf.astype(dtype).astype(jnp.float32), params)

    @jax.jit
    def of_share(params: Any, x: Any, y: Any) -> Any:
        def scaled(params: Any) -> Any:
            low = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
            value = loss(low, x.astype(dtype), y.astype(dtype))
            return value * scale, value

        low = jax.tree.map(lambda leaf: leaf.astype(dtype), params) if sharded else params
        return jax.value_and_grad(scaled, has_aux=True)(low)

    losses = []
    for batch in batches():
        found = [of_share(params, *share(batch, rank, size)) for rank in range(size)]
        losses.append(np.mean([value.item() for (_, value), _ in found]))
        total = found[0][1]
        for _, gradients in found[1:]:
            total = jax.tree.map(jnp.add, total, gradients)
        mean = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) / (size * scale), total)
        if limit is not None:
            factor = jnp.minimum(1.0, limit / (optax.tree.norm(mean) + 1e-6))
            mean = jax.tree.map(lambda leaf, factor=factor: leaf * factor, mean)
        params = jax.tree.map(lambda leaf, gradient: leaf - RATE * gradient, params, mean)
    if sharded:
        params = jax.tree.map(lambda leaf: leaf.astype(dtype).astype(jnp.float32), params)
    return losses, jax.tree.leaves(params)


@pytest.mark.parametrize("zero", ["", "zero=1", "zero=2", "zero=3:bucket_mb=0.001"])
@pytest.mark.parametrize(
    ("size", "name", "rest", "limit"),
    [(1, "bf16", "", None), (2, "bf16", ",clip_norm=0.5", 0.5), (2, "fp16", ":loss_scale=1024", None)],
)
def test_numbers_are_those_of_a_program_with_the_same_casts(
    size: int, name: str, rest: str, limit: float | None, zero: str, jax_pools: PartPools
) -> None:
    strategy = ",".join(filter(None, [zero, f"precision={name}{rest}"]))
    for losses, params, dtype in jax_pools.get(size, engine="shm").run(train, (strategy,)):
        wanted, leaves = expected(name, size, sharded=bool(zero), scale=1024 if name == "fp16" else 1, limit=limit)
        assert dtype == (jnp.dtype(NARROW[name]).name if zero else "float32")
        if size == 1:
            assert losses == wanted
        np.testing.assert_allclose(losses, wanted, rtol=1e-6 if limit is None else 1e-3)  # its factor is rounded, too
        tolerance = 1e-6 if limit is None else 1e-5
        for found, value in zip(params, leaves, strict=True):
            np.testing.assert_allclose(
                found, value, rtol=0, atol=(2.0**-8 if zero else tolerance) * np.abs(value).max()
            )


@pytest.mark.parametrize(
    "line", ["precision=bf16", "zero=2,precision=fp16:loss_scale=1024:reduce=fp32", "precision=bf16,accumulate=2"]
)
def test_it_learns_as_in_32_bits(line: str, jax_pools: PartPools) -> None:
    pool = jax_pools.get(2, engine="shm")
    plain = "accumulate=2" if "accumulate" in line else "data"
    for (losses, *_), (wanted, *_) in zip(pool.run(train, (line,)), pool.run(train, (plain,)), strict=True):
        np.testing.assert_allclose(losses, wanted, rtol=0.02)


def resume(strategy: str, folder: str) -> bool:
    """Save in the middle; return whether a step resumes from it exactly, and a plain one has its master weights."""
    ud.init()
    try:

        def made(strategy: str) -> Any:
            return ud.TrainStep(loss, jax.tree.map(jnp.ones_like, parameters()), optax.adam(0.01), strategy)

        own = [share(batch, ud.rank(), ud.size()) for batch in batches()]
        step = made(strategy)
        for batch in own[:3]:
            step(*batch)
        ud.save(folder, step)
        again, plain = made(strategy), made("data")
        ud.load(folder, again)
        ud.load(folder, plain)
        values = [step.params, plain.params]
        rounded = jax.tree.map(lambda wanted, master: bool((wanted == master.astype(wanted.dtype)).all()), *values)
        return all(step(*batch) == again(*batch) for batch in own[3:]) and all(jax.tree.leaves(rounded))
    finally:
        ud.shutdown()


@pytest.mark.parametrize("zero", ["", "zero=1,", "zero=3:bucket_mb=0.001,"])
def test_a_checkpoint_has_the_master_weights(zero: str, jax_pools: PartPools, tmp_path: Path) -> None:
    strategy = f"{zero}precision=fp16:loss_scale=1024:growth_interval=2"
    assert jax_pools.get(2, engine="shm").run(resume, (strategy, str(tmp_path / "saved"))) == [True, True]


def overflow(strategy: str) -> tuple[list[list[Any]], list[float], int, int]:
    """Let the gradients of rank 1 overflow in the second of three steps.

    Returns:
        The parameters after each step, the loss scales, the number of updates, and how often the loss was traced.
    """
    ud.init()
    try:
        traced = []

        def counted(params: Any, x: Any, y: Any) -> Any:
            traced.append(1)
            return loss(params, x, y)

        step = ud.TrainStep(counted, parameters(), optax.adam(0.01), strategy)
        update = step.optimizer.binding.distributed_update
        found, scales = [], []
        for number, batch in enumerate(batches()[:3]):
            x, y = share(batch, ud.rank(), ud.size())
            if number == 1 and ud.rank() == 1:
                x = x * np.float32(6e4)
            step(x, y)
            found.append([np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(step.params)])
            scales.append(update.scaler.scale)
        return found, scales, update.step, len(traced)
    finally:
        ud.shutdown()


@pytest.mark.parametrize("zero", ["", "zero=2,", "zero=3,"])
def test_where_one_rank_overflowed_no_rank_updates(zero: str, jax_pools: PartPools) -> None:
    ranks = jax_pools.get(2, engine="shm").run(overflow, (f"{zero}precision=fp16:loss_scale=256:growth_interval=1",))
    for found, scales, num_updates, num_traced in ranks:
        assert scales == [512.0, 256.0, 512.0]
        assert num_updates == 2
        assert num_traced <= 2  # the scale is no constant of the program
        first, second, third = found
        assert all((a == b).all() for a, b in zip(first, second, strict=True))
        assert any((a != b).any() for a, b in zip(second, third, strict=True))
        for mine, others in zip(found, ranks[0][0], strict=True):
            assert all((a == b).all() for a, b in zip(mine, others, strict=True))


@pytest.fixture
def _runtime() -> Iterator[None]:
    ud.init()
    yield
    ud.shutdown()


@pytest.mark.usefixtures("_runtime")
def test_only_what_is_float32_is_cast() -> None:
    found = {}

    def look(params: Any, x: Any, ids: Any, *, stats: Any) -> Any:
        arrays = {**params, "x": x, "ids": ids, "stats": stats}
        found.update({name: str(array.dtype) for name, array in arrays.items()})
        return jnp.sum(params["a"]) + jnp.sum(params["b"].astype(jnp.float32))

    params = {"a": jnp.ones(2, jnp.float32), "b": jnp.ones(2, jnp.float16)}
    step = ud.TrainStep(look, params, optax.sgd(0.1), "precision=bf16")
    value = step(jnp.ones(3, jnp.float32), jnp.arange(3), stats=jnp.ones(3, jnp.float32))
    assert found == {"a": "bfloat16", "b": "float16", "x": "bfloat16", "ids": "int32", "stats": "float32"}
    assert (value.dtype, step.params["a"].dtype) == (jnp.float32, jnp.float32)
    assert step.evaluate(jnp.ones(3), jnp.arange(3), stats=jnp.ones(3)).dtype == jnp.float32


@pytest.mark.usefixtures("_runtime")
def test_says_what_it_cannot_do() -> None:
    with pytest.raises(UsageError, match="the arrays of the parameters are: float16"):
        ud.TrainStep(lambda p: p["w"].sum(), {"w": jnp.ones(2, jnp.float16)}, optax.sgd(0.1), "precision=bf16")
    with pytest.raises(UsageError, match=r"use TrainStep\(loss_fn, params, optimizer\)"):
        ud.distribute({"w": jnp.ones(2)}, optax.sgd(0.1), "precision=bf16")


@pytest.mark.usefixtures("_runtime")
def test_fp32_gives_narrow_parameters_masters() -> None:
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    step = ud.TrainStep(lambda p: p["w"].sum().astype(jnp.float32), params, optax.sgd(1e-3), "zero=1,precision=fp32")
    for _ in range(3):
        step()  # 1 - 0.001 is 1 in 16 bits
    np.testing.assert_allclose(step.held["w"], 0.997, rtol=1e-6)
    assert step.params["w"].dtype == jnp.bfloat16
