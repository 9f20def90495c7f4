"""Trainings in Keras whose variables are on server processes have the numbers of one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from parameter_servers import RunningServers, with_servers
from part_pools import PartPools

from unidist.settings import job_secret

pytest.importorskip("tensorflow")
sys.path.insert(0, str(Path(__file__).parents[1]))  # the ranks get this path too

import _store_keras as training

pytestmark = pytest.mark.parallel
CASES = [
    ("parameter_server=sync:servers=1", "momentum", "function"),
    ("parameter_server=sync:servers=2:shard_size=64B", "adam", "fit"),
    ("parameter_server=async:staleness=0:servers=2:replicas=1", "adagrad", "eager"),
]


@pytest.fixture(scope="module")
def servers(tensorflow_pools: PartPools) -> Iterator[RunningServers]:
    """Two servers."""
    running = RunningServers(2, tensorflow_pools.get(1).run(job_secret)[0])
    yield running
    running.close()


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_synchronous_training_has_the_numbers_of_one_process(
    tensorflow_pools: PartPools, servers: RunningServers, size: int
) -> None:
    (expected,) = tensorflow_pools.get(1).run(training.all_alone, (CASES, 5))
    found = tensorflow_pools.get(size).run(with_servers, (servers.directory.port, training.all_trained, CASES, 5))
    for rank, each in enumerate(found):
        for case, one, other in zip(CASES, each, expected, strict=True):
            assert training.error(one, other) <= 1e-12, (case, rank)


def test_an_asynchronous_training_comes_as_far(tensorflow_pools: PartPools, servers: RunningServers) -> None:
    cases = [("parameter_server=async:servers=2", "adamw", "fit")]
    start, whole = (tensorflow_pools.get(1).run(training.alone, ("adamw", steps))[0] for steps in (0, 5))
    outcomes = tensorflow_pools.get(2).run(with_servers, (servers.directory.port, training.all_trained, cases, 5))
    for (found,) in outcomes:
        assert 0.1 < training.error(found, start) / training.error(whole, start) < 5
