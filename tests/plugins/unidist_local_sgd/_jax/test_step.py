"""Local SGD with optax gives the numbers of the published algorithms, in steps and in loops of the script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from part_pools import PartPools

pytest.importorskip("jax")

import local_sgd_jax
from local_sgd_jax import Case

pytestmark = pytest.mark.parallel

LIMIT = 1e-12
CASES = [
    Case(1),
    Case(3, optimizer="adamw", mode="jit"),
    Case(4, outer="nesterov", rate=0.7, optimizer="adamw"),
    Case(4, outer="nesterov", rate=0.7, after=3, mode="jit"),
    Case(4, outer="sgd", rate=0.5, fragments=2, delay=1, mix=0.25, optimizer="momentum"),
    Case(3, fragments=2, delay=2, mode="eager", steps=8),
    Case(2, outer="nesterov", rate=0.5, optimizer="momentum", passes=2, steps=7),
    Case(1, outer="sgd", rate=0.5, mode="jit", steps=3),
]


def largest_difference(found: Any, expected: Any) -> float:
    assert found.keys() == expected.keys()
    return max(float(np.max(np.abs(found[name] - expected[name]))) for name in expected)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_come_to_the_numbers_of_copies_in_one_process(jax_pools: PartPools, size: int) -> None:
    cases = CASES if size < 3 else CASES[2:5]
    expected = jax_pools.get(1).run(_simulate, (cases, size))[0]
    found = jax_pools.get(size).run(local_sgd_jax.train, (cases,))
    for number, case in enumerate(cases):
        before, after = expected[number]
        for rank in range(size):
            assert largest_difference(found[rank][number][0], before[rank]) < LIMIT, (case, rank)
            assert largest_difference(found[rank][number][1], after) < LIMIT, (case, rank)


def _simulate(cases: list[Case], size: int) -> list[Any]:
    return [local_sgd_jax.simulate(case, size) for case in cases]


def test_ranks_of_a_host_train_together_and_hosts_synchronize(jax_pools: PartPools) -> None:
    case = Case(3, outer="nesterov", rate=0.7, optimizer="adamw", hosts=2)
    ((before, after),) = jax_pools.get(1).run(_simulate, ([case], 4))[0]
    for rank, [found] in enumerate(jax_pools.get(4).run(local_sgd_jax.train, ([case],))):
        assert largest_difference(found[0], before[rank]) < LIMIT
        assert largest_difference(found[1], after) < LIMIT


def test_outer_gradients_travel_compressed(jax_pools: PartPools) -> None:
    case = Case(4, outer="nesterov", rate=0.7, options=":compression=fp16", steps=8)
    ((before, _),) = jax_pools.get(1).run(_simulate, ([case], 2))[0]
    first, second = (each[0][0] for each in jax_pools.get(2).run(local_sgd_jax.train, ([case],)))
    assert LIMIT < largest_difference(first, before[0]) < 1e-3
    assert largest_difference(first, second) == 0.0


def test_a_checkpoint_needs_equal_ranks_and_a_resumed_training_is_the_one_that_went_on(
    jax_pools: PartPools, tmp_path: Path
) -> None:
    case = Case(4, outer="nesterov", rate=0.7, optimizer="adamw")
    for message, undisturbed, resumed in jax_pools.get(2).run(
        local_sgd_jax.save_and_resume, (case, str(tmp_path / "saved"))
    ):
        assert "Before save call synchronize(step)" in message
        assert largest_difference(resumed, undisturbed) == 0.0


def test_trees_are_saved_with_the_optimizer_only(jax_pools: PartPools, tmp_path: Path) -> None:
    [message] = jax_pools.get(1).run(local_sgd_jax.save_without_optimizer, (str(tmp_path / "saved"),))
    assert "under 'local_sgd' the ranks' parameters may differ" in message
