"""Keras on JAX gives the numbers of one process on all samples, whatever the optimizer, the strategy and the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from _keras_training import BATCH, WAYS, alone, by_fit, network, runtime, values
from part_pools import PartOfPool

import unidist.keras as ud

pytestmark = pytest.mark.parallel

optimizers = keras.optimizers


def _adamw() -> Any:
    optimizer = optimizers.AdamW(0.05, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optimizers.Adam(0.01),
    "adamw": _adamw,
    "clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.05),
    "global_clipnorm": lambda: optimizers.SGD(0.1, global_clipnorm=0.05),
    "clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.01),
    "moving averages": lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    "keras accumulates": lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "scaled loss": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.01, clipnorm=0.05), dynamic_growth_steps=3),
    "schedule": lambda: optimizers.Adam(optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "muon": lambda: optimizers.Muon(0.01),
    "lamb": lambda: optimizers.Lamb(0.01),
}


def _error(name: str, strategy: str | None, way: str = "fit", batch: int = BATCH) -> float:
    """Return the largest difference from one process; collective."""
    with runtime():
        model, optimizer = ud.distribute(network(), OPTIMIZERS[name](), strategy)
        weights = values(model)
        WAYS[way](model, optimizer)
        wanted = _in_one_process(name, weights, batch=batch, eagerly=way in ("fit eagerly", "apply"))
        assert any(np.abs(one - other).max() > 1e-3 for one, other in zip(weights, wanted, strict=True))
        return max(float(np.abs(one - other).max()) for one, other in zip(values(model), wanted, strict=True))


_known: dict[Any, list[Any]] = {}
"""What one process has computed: the strategies of one test are compared with the same."""


def _in_one_process(name: str, weights: list[Any], *, batch: int, eagerly: bool) -> list[Any]:
    key = (name, batch, eagerly, *(weight.tobytes() for weight in weights))
    if key not in _known:
        _known[key] = alone(weights, OPTIMIZERS[name](), batch=batch, eagerly=eagerly)
    return _known[key]


def _errors(cases: list[tuple[Any, ...]]) -> dict[str, float]:
    return {str(case): _error(*case) for case in cases}


def _check(pool: PartOfPool, cases: list[tuple[Any, ...]], *, tolerance: float = 1e-12) -> None:
    for found in pool.run(_errors, (cases,)):
        assert {case: error for case, error in found.items() if not error < tolerance} == {}


def test_every_strategy_does_what_one_process_does(two: PartOfPool) -> None:
    _check(two, [("adamw", strategy) for strategy in ("data", "zero=1", "zero=2", "zero=1:whole=true")])


@pytest.mark.parametrize("name", ["clipnorm", "global_clipnorm", "moving averages", "scaled loss"])
def test_what_keras_does_with_all_gradients_is_done_with_the_mean(two: PartOfPool, name: str) -> None:
    _check(two, [(name, "data"), (name, "zero=1")])


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_does_what_it_does_in_one_process(two: PartOfPool, name: str) -> None:
    _check(two, [(name, strategy) for strategy in ("data", "zero=1", "zero=2", "zero=1:whole=true")])


def test_an_optimizer_that_looks_at_whole_variables_gets_them(two: PartOfPool) -> None:
    _check(two, [("muon", "zero=1")])


def test_three_ranks_do_what_one_process_does(jax_pools: Any) -> None:
    # Keras rounds gradients of a hidden layer to float32, also in float64: a third of a sum is rounded differently.
    _check(jax_pools.get(3, engine="shm"), [("adam", "data"), ("adam", "zero=1")], tolerance=1e-6)


@pytest.mark.parametrize("way", ["fit eagerly", "fit, two steps at a time", "batches"])
def test_every_way_of_fit_does_the_same(two: PartOfPool, way: str) -> None:
    _check(two, [("adamw", "data", way), ("adamw", "zero=1", way)])


@pytest.mark.parametrize("way", ["stateless loop", "apply"])
def test_loops_of_a_script_do_the_same(two: PartOfPool, way: str) -> None:
    _check(two, [("adamw", "data", way), ("adamw", "zero=1", way)])


@pytest.mark.parametrize("way", ["fit", "apply"])
def test_accumulating_is_one_update_on_all_passes(two: PartOfPool, way: str) -> None:
    strategies = ("accumulate=2", "zero=1,accumulate=2", "zero=2,accumulate=2")
    _check(two, [("adamw", strategy, way, 2 * BATCH) for strategy in strategies])


def test_strategies_clip_the_mean_gradient(two: PartOfPool) -> None:
    def on_rank() -> None:
        for strategy, options in (
            ("clip_norm=0.05", {"global_clipnorm": 0.05}),
            ("zero=1,clip_norm=0.05", {"global_clipnorm": 0.05}),
            ("clip_value=0.01", {"clipvalue": 0.01}),
        ):
            with runtime():
                model, optimizer = ud.distribute(network(), optimizers.SGD(0.1), strategy)
                weights = values(model)
                by_fit(model, optimizer)
                for one, other in zip(values(model), alone(weights, optimizers.SGD(0.1, **options)), strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)  # unidist's norm has an epsilon

    two.run(on_rank)


def test_compressed_gradients_are_near_and_equal_on_all_ranks(two: PartOfPool) -> None:
    def on_rank() -> list[bytes]:
        with runtime("float32"):
            optimizer = ud.DistributedOptimizer(optimizers.SGD(0.1), compression=ud.Compression.fp16)
            model = network()
            model.set_weights(values_of_rank_0 := [np.full_like(each, 0.1) for each in values(model)])
            by_fit(model, optimizer)
            for one, other in zip(values(model), alone(values_of_rank_0, optimizers.SGD(0.1)), strict=True):
                np.testing.assert_allclose(one, other, atol=2e-3)
            return [each.tobytes() for each in values(model)]

    first, second = two.run(on_rank)
    assert first == second


def test_zero_keeps_a_half_of_the_state(two: PartOfPool) -> None:
    def on_rank() -> tuple[int, int]:
        sizes = []
        for strategy in ("data", "zero=1"):
            with runtime():
                model, optimizer = ud.distribute(network(), optimizers.Adam(0.01), strategy)
                by_fit(model, optimizer)
                sizes.append(sum(int(np.prod(each.shape)) for each in optimizer.variables))
        return sizes[0], sizes[1]

    found = two.run(on_rank)
    whole = {sizes[0] for sizes in found}.pop()
    assert all(0.4 * whole < sharded < 0.6 * whole + 40 for _, sharded in found), found
