"""Trainings in Keras whose variables are in a store: the numbers of one process, checkpoints, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from part_pools import PartPools

pytest.importorskip("tensorflow")
sys.path.insert(0, str(Path(__file__).parents[1]))  # the ranks get this path too

import _store_keras as training

pytestmark = pytest.mark.parallel
LIMIT = 1e-12
SMALL = "shard_size=64B"
CASES = [
    (f"parameter_server=sync:{SMALL}", "momentum", "function"),
    ("parameter_server=sync", "adam", "eager"),
    ("parameter_server=async:staleness=0", "adamw", "fit"),
    ("parameter_server=sync", "adagrad", "function"),
    ("parameter_server=sync:push=delta", "sgd", "function"),
]


@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.soak)])
def test_a_synchronous_training_has_the_numbers_of_one_process(tensorflow_pools: PartPools, size: int) -> None:
    pool = tensorflow_pools.get(size)
    (expected,) = tensorflow_pools.get(1).run(training.all_alone, (CASES, 5))
    for rank, found in enumerate(pool.run(training.all_trained, (CASES, 5))):
        for case, one, other in zip(CASES, found, expected, strict=True):
            assert training.error(one, other) <= LIMIT, (case, rank)


def test_an_asynchronous_training_comes_as_far(tensorflow_pools: PartPools) -> None:
    cases = [
        ("parameter_server=async", "adamw", "fit"),
        ("parameter_server=async:push=delta:push_every=2", "nadam", "function"),
    ]
    start, whole = (tensorflow_pools.get(1).run(training.alone, ("adamw", steps))[0] for steps in (0, 5))
    for found in tensorflow_pools.get(2).run(training.all_trained, (cases, 5)):
        for one in found:
            assert 0.1 < training.error(one, start) / training.error(whole, start) < 5


@pytest.mark.parametrize("strategy", ["sync", "async", "async:push=delta"])
def test_checkpoints_go_from_here_to_data_and_back(tensorflow_pools: PartPools, tmp_path: Path, strategy: str) -> None:
    own, pool = f"parameter_server={strategy}:{SMALL}", tensorflow_pools.get(2)
    saved = pool.run(training.saved, (own, "adamw", str(tmp_path / "own"), 3))
    assert training.error(*saved) == 0.0, "the ranks were made equal"
    if strategy != "sync":
        loaded = pool.run(training.continued, ("data", "adamw", str(tmp_path / "own"), 0))
        assert training.error(loaded[0], saved[0]) == 0.0
        return
    there = pool.run(training.continued, ("data", "adamw", str(tmp_path / "own"), 3))
    here = pool.run(training.continued, (own, "adamw", str(tmp_path / "own"), 3, 2))
    assert training.error(there[0], here[0]) <= LIMIT
    pool.run(training.saved, ("data", "adamw", str(tmp_path / "data"), 3))
    there = pool.run(training.continued, ("data", "adamw", str(tmp_path / "data"), 3))
    here = pool.run(training.continued, (own, "adamw", str(tmp_path / "data"), 3))
    assert training.error(there[0], here[0]) <= LIMIT


@pytest.mark.parametrize("script", [training.refusals, training.changed_variables, training.a_fast_rank_does_not_wait])
def test_a_script(tensorflow_pools: PartPools, script: object) -> None:
    assert tensorflow_pools.get(2).run(script) == [None, None]  # type: ignore[arg-type]
