"""Tensor parallelism in JAX gives the numbers of one process, and says what it cannot do."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from part_pools import PartPools

from unidist.errors import ConfigurationError, UsageError

jax = pytest.importorskip("jax", reason="the training is in JAX")

import jax.numpy as jnp  # noqa: E402 - after JAX is known to be there
import optax  # noqa: E402 - it needs JAX
from gpt_jax import BATCH, TOKENS, gpt, loss_fn, train_beside_one_process  # noqa: E402

import unidist.jax as ud  # noqa: E402

pytestmark = pytest.mark.parallel

PLAN = "words=vocabulary+blocks.*.qkv=qkv+blocks.*.out=row+blocks.*.up=column+blocks.*.down=row"


@pytest.fixture(scope="module")
def rank_pools(jax_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return jax_pools


@pytest.mark.parametrize("strategy", ["", ",clip_norm=0.1,accumulate=2"])
def test_a_gpt_trains_as_in_one_process(jax_pools: PartPools, strategy: str) -> None:
    jax_pools.get(2, engine="shm").run(train_with_dropout, (f"tensor=2:plan={PLAN}{strategy}",))


@pytest.mark.parametrize(
    ("optimizer", "strategy", "rtol"),
    [("muon", ",clip_norm=0.1,accumulate=2", 1e-10), ("lamb", "", 1e-12), ("adafactor", "", 1e-9)],
)
def test_optimizers_of_whole_arrays_get_them(
    jax_pools: PartPools, tmp_path: Path, optimizer: str, strategy: str, rtol: float
) -> None:
    run = functools.partial(train_beside_one_process, optimizer=optimizer, folder=str(tmp_path / "run"), rtol=rtol)
    jax_pools.get(2, engine="shm").run(run, (f"tensor=2:plan={PLAN}{strategy}",))


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["tensor=2", "tensor=4"])
def test_a_gpt_on_more_ranks(jax_pools: PartPools, strategy: str) -> None:
    jax_pools.get(4, engine="shm").run(train_with_dropout, (f"{strategy}:plan={PLAN},zero=2,clip_norm=0.1",))


def train_with_dropout(strategy: str) -> None:
    train_beside_one_process(strategy, drops=True)


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
    with pytest.raises(UsageError, match=r"whole array.*Leave zero out"):
        ud.TrainStep(loss_fn, params, optax.lamb(0.1), strategy=f"{plan},zero=1")
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
