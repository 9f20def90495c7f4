"""Trainings in PyTorch whose parameters are in a store: the numbers of one process, and what is promised without."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from part_pools import PartPools

from unidist.testing import StrategyConformance

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1]))  # the ranks get this path too

import _store_torch as training

pytestmark = pytest.mark.parallel
LIMIT = 1e-12
SMALL = "shard_size=64B"
"""Shards of 8 elements, across parameters."""


@pytest.fixture(scope="module")
def rank_pools(torch_pools: PartPools) -> PartPools:
    """The ranks of this module."""
    return torch_pools


class TestConformance(StrategyConformance):
    strategy = f"parameter_server=sync:{SMALL}"
    sizes: ClassVar = (3,)


CASES = [
    (f"parameter_server=sync:{SMALL}", "adagrad", 1),
    ("parameter_server=sync", "adam", 1),
    ("parameter_server=sync", "momentum", 1),
    (f"parameter_server=sync:{SMALL},accumulate=2", "adamw", 2),
    ("parameter_server=sync:push=delta", "sgd", 1),
]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_synchronous_training_has_the_numbers_of_one_process(torch_pools: PartPools, size: int) -> None:
    outcomes = torch_pools.get(size).run(training.all_trained, (CASES,))
    for number, (_, optimizer, passes) in enumerate(CASES):
        expected = training.alone(optimizer, 5, passes)
        for rank, found in enumerate(outcomes):
            assert training.error(found[number], expected) <= LIMIT, (CASES[number], rank)


def test_a_staleness_of_0_is_synchronous_in_the_same_bits_run_after_run(torch_pools: PartPools) -> None:
    lines = ["parameter_server=sync", "parameter_server=async:staleness=0", "parameter_server=sync"]
    outcomes = torch_pools.get(3).run(training.all_trained, ([(line, "adamw", 1) for line in lines],))
    first = outcomes[0][0]
    for found in outcomes:
        for other in found:
            assert all(np.array_equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    "options", ["", ":staleness=1", ":scale=none", ":modulate=staleness", ":push_every=3", ":push=delta"]
)
def test_asynchronous_weights_are_those_of_the_logged_pushes(torch_pools: PartPools, options: str) -> None:
    steps, size = 15, 2
    outcomes = torch_pools.get(size).run(
        training.linear_problem, (f"parameter_server=async:shard_size=64B{options}", steps)
    )
    logs, _, final = outcomes[0]
    num_pushes = steps // 3 if "push_every" in options else steps
    factor = 1.0 if "none" in options else 1 / size
    for index, log in enumerate(logs):
        assert sorted(log) == [(rank, number) for rank in range(size) for number in range(1, num_pushes + 1)]
        if "modulate" in options:
            continue  # which staleness a push had is not logged
        weights = np.zeros(8)
        for rank, number in log:
            change = outcomes[rank][1][number][index]
            weights = weights + factor * change if "delta" in options else weights - 0.1 * factor * change
        assert np.abs(weights - final[index]).max() < 1e-12
    target = np.arange(40.0)
    found = np.concatenate(final)
    assert np.abs(found - target).max() < np.abs(target).max(), "it comes closer"


def test_local_steps_between_fetches_are_plain_gradient_descent(torch_pools: PartPools) -> None:
    """One worker that pushes at once and fetches after four steps, as it can be computed by hand."""
    (found,) = torch_pools.get(1).run(training.linear_problem, ("parameter_server=async:fetch_every=4", 4))
    weights = np.zeros(40)
    total = np.zeros(40)
    for _ in range(4):
        gradient = weights - np.arange(40.0)
        total += gradient
        weights = weights - 0.1 * gradient
    assert np.abs(np.concatenate(found[2]) - -0.1 * total).max() < 1e-12


def test_with_backup_workers_training_ends_everywhere(torch_pools: PartPools) -> None:
    outcomes = torch_pools.get(3).run(training.all_trained, ([("parameter_server=sync:backup=1", "adamw", 1)],))
    start, whole = training.alone("adamw", 0), training.alone("adamw", 5)
    for (found,) in outcomes:
        assert 0.2 < training.error(found, start) / training.error(whole, start) < 5


@pytest.mark.parametrize("strategy", ["sync", "async", "sync:push=delta", "async:push=delta:push_every=2"])
def test_checkpoints_go_from_here_to_data_and_back(torch_pools: PartPools, tmp_path: Path, strategy: str) -> None:
    own, pool = f"parameter_server={strategy}:{SMALL}", torch_pools.get(2)
    parameters = pool.run(training.saved, (own, "adamw", str(tmp_path / "own"), 3))
    assert training.error(*parameters) == 0.0, "the ranks were made equal"
    if strategy == "sync":
        there = pool.run(training.continued, ("zero=1", "adamw", str(tmp_path / "own"), 3))
        here = pool.run(training.continued, (own, "adamw", str(tmp_path / "own"), 3))
        assert training.error(there[0], here[0]) <= LIMIT
        pool.run(training.saved, ("data", "adamw", str(tmp_path / "data"), 3))
        there = pool.run(training.continued, ("data", "adamw", str(tmp_path / "data"), 3))
        here = pool.run(training.continued, (own, "adamw", str(tmp_path / "data"), 3))
        assert training.error(there[0], here[0]) <= LIMIT
        assert training.error(there[0], pool.run(training.continued, ("data", "adamw", "", 3))[0]) > 1e-3
    else:
        loaded = pool.run(training.continued, ("data", "adamw", str(tmp_path / "own"), 0))
        assert training.error(loaded[0], parameters[0]) == 0.0
