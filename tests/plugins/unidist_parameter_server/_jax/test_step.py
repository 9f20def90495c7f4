"""Optimizers of optax under `parameter_server:push=delta` give the numbers of one process, in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from part_pools import PartPools

pytest.importorskip("jax")

import parameter_server_jax

pytestmark = pytest.mark.parallel

LIMIT = 1e-12


def largest_difference(found: Any, expected: Any) -> float:
    assert found.keys() == expected.keys()
    return max(float(np.max(np.abs(found[name] - expected[name]))) for name in expected)


@pytest.mark.parametrize(
    ("size", "optimizer", "mode"),
    [(2, "sgd", "step"), (3, "adamw", "step"), (2, "momentum", "jit"), (2, "sgd", "eager")],
)
def test_a_synchronous_step_adds_the_mean_of_the_updates(
    jax_pools: PartPools, size: int, optimizer: str, mode: str
) -> None:
    [expected] = jax_pools.get(1).run(parameter_server_jax.simulate, (optimizer, size))
    outcomes = jax_pools.get(size).run(
        parameter_server_jax.train, ("parameter_server=sync:push=delta", optimizer, mode)
    )
    for found, _ in outcomes:
        assert largest_difference(found, expected) < LIMIT
        assert largest_difference(found, outcomes[0][0]) == 0.0


def test_with_plain_sgd_that_is_data(jax_pools: PartPools) -> None:
    pool = jax_pools.get(2)
    line = "parameter_server=sync:push=delta,accumulate=2"
    with_store, plain = (
        pool.run(parameter_server_jax.train, (each, "sgd", "jit")) for each in (line, "data,accumulate=2")
    )
    for (found, _), (expected, _) in zip(with_store, plain, strict=True):
        assert largest_difference(found, expected) < LIMIT


def test_ranks_are_synchronized_while_a_step_still_runs(jax_pools: PartPools) -> None:
    found = jax_pools.get(2).run(parameter_server_jax.synchronized_right_after_a_slow_step)
    assert largest_difference(found[0], found[1]) == 0.0
    assert largest_difference(found[0], parameter_server_jax.parameters()) > 1e-3


@pytest.mark.parametrize("mode", ["step", "jit"])
def test_one_asynchronous_worker_trains_as_one_process(jax_pools: PartPools, mode: str) -> None:
    [expected] = jax_pools.get(1).run(parameter_server_jax.simulate, ("adamw", 1))
    [(found, _)] = jax_pools.get(1).run(
        parameter_server_jax.train, ("parameter_server=async:push=delta", "adamw", mode)
    )
    assert largest_difference(found, expected) < LIMIT


@pytest.mark.parametrize("options", ["", ":staleness=2", ":staleness=0", ":push_every=2:fetch_every=3"])
def test_each_push_of_asynchronous_workers_counts_once(jax_pools: PartPools, options: str) -> None:
    [expected] = jax_pools.get(1).run(parameter_server_jax.constant_result, (2,))
    line = f"parameter_server=async{options}:push=delta"
    outcomes = jax_pools.get(2).run(parameter_server_jax.train, (line, "sgd", "step"), {"is_constant": True})
    for found, losses in outcomes:
        assert largest_difference(found, expected) < LIMIT
        assert len(losses) == parameter_server_jax.STEPS
    if options != ":staleness=0":
        assert outcomes[0][1][0] != outcomes[1][1][0], "the loss is that of this rank's batch"


def test_ranks_are_equal_after_steps_with_backup_workers(jax_pools: PartPools) -> None:
    line = "parameter_server=sync:backup=1:push=delta"
    (first, _), *others = jax_pools.get(3).run(parameter_server_jax.train, (line, "sgd", "step"))
    assert largest_difference(first, {name: np.zeros_like(value) for name, value in first.items()}) > 0.1
    for found, _ in others:
        assert largest_difference(found, first) == 0.0


def test_an_evaluation_is_of_the_newest_parameters(jax_pools: PartPools) -> None:
    (first, has_moved), (second, _) = jax_pools.get(2).run(parameter_server_jax.evaluated_after_pushes_of_the_other)
    assert first == second
    assert has_moved


def test_a_resumed_training_is_the_one_that_went_on(jax_pools: PartPools, tmp_path: Path) -> None:
    line = "parameter_server=sync:push=delta"
    for message, undisturbed, resumed in jax_pools.get(2).run(
        parameter_server_jax.save_and_resume, (line, str(tmp_path / "saved"))
    ):
        assert "Before save call synchronize(step)" in message
        assert largest_difference(resumed, undisturbed) < LIMIT


@pytest.mark.parametrize("line", ["parameter_server=sync", "parameter_server=async", "central_storage"])
def test_pushing_gradients_is_refused_and_the_error_says_what_works(jax_pools: PartPools, line: str) -> None:
    [message] = jax_pools.get(1).run(parameter_server_jax.refused, (line,))
    assert "a store cannot run optimizers of optax" in message
    assert ":push=delta" in message
