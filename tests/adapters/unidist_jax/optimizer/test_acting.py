"""Strategies that act on parameters between two updates, under JAX."""

from __future__ import annotations

from typing import Any

import acting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _programs import runtime
from part_pools import PartOfPool

import unidist.jax as ud
from unidist.errors import PluginError, UsageError

pytestmark = pytest.mark.parallel


def _loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((x @ params["w"] - y) ** 2)


def _train(mode: str, strategy: str, passes: int) -> tuple[Any, list[float]]:
    acting.Halves.seen.clear()
    strategies = [*([strategy] if strategy else []), acting.Halves()]
    batches = [acting.batch(number, ud.rank(), ud.size()) for number in range(passes * acting.STEPS)]
    if mode == "step":
        step = ud.TrainStep(_loss, {"w": jnp.asarray(acting.weights())}, optax.sgd(0.1), strategies)
        for x, y in batches:
            step(x, y)
        return np.asarray(step.params["w"]), acting.Halves.seen
    params, optimizer = ud.distribute({"w": jnp.asarray(acting.weights())}, optax.sgd(0.1), strategies)

    def update(params: Any, state: Any, x: Any, y: Any) -> Any:
        updates, state = optimizer.update(jax.grad(_loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    run = jax.jit(update) if mode == "jit" else update
    state = optimizer.init(params)
    for x, y in batches:
        params, state = run(params, state, x, y)
    return np.asarray(params["w"]), acting.Halves.seen


@pytest.mark.parametrize("mode", ["step", "jit", "eager"])
@pytest.mark.parametrize(("strategy", "passes"), [("", 1), ("zero=1", 1), ("accumulate=2", 2)])
def test_it_acts_after_the_updates_that_it_wants(two: PartOfPool, mode: str, strategy: str, passes: int) -> None:
    def on_rank() -> tuple[Any, list[float]]:
        with runtime():
            return _train(mode, strategy, passes)

    for found, seen in two.run(on_rank):
        np.testing.assert_allclose(found, acting.expected(passes), rtol=0, atol=1e-14)
        assert seen == [pytest.approx(acting.weights().sum(), rel=1e-14)]


def test_a_step_that_does_not_ask_is_an_error(two: PartOfPool) -> None:
    def on_rank() -> None:
        with (
            runtime(),
            pytest.raises(PluginError, match="halves: acts on parameters between two updates, and this way"),
        ):
            _train("step", "zero=3", 1)

    two.run(on_rank)


def test_a_loop_without_parameters_is_an_error(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            optimizer = ud.distribute(optax.sgd(0.1), strategy=[acting.Halves()])
            params = jnp.ones(3)
            with pytest.raises(UsageError, match="halves: acts on parameters, so it needs them"):
                optimizer.update(params, optimizer.init(params))

    two.run(on_rank)
