"""Trainings in PyTorch whose parameters are on server processes have the numbers of one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from parameter_servers import RunningServers, with_servers
from part_pools import PartPools

from unidist.settings import job_secret

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1]))  # the ranks get this path too

import _store_torch as training

pytestmark = pytest.mark.parallel
LIMIT = 1e-12
SMALL = "shard_size=64B"


@pytest.fixture(scope="module")
def servers(torch_pools: PartPools) -> Iterator[RunningServers]:
    """Three servers, of which a training uses as many as it names."""
    running = RunningServers(3, torch_pools.get(1).run(job_secret)[0])
    yield running
    running.close()


def cases(num_servers: int) -> list[tuple[str, str, int]]:
    where = f"servers={num_servers}:{SMALL}"
    return [
        (f"parameter_server=sync:{where}", "adagrad", 1),
        (f"parameter_server=sync:{where}", "momentum", 1),
        (f"parameter_server=sync:{where},accumulate=2", "adamw", 2),
        (f"parameter_server=sync:push=delta:{where}", "sgd", 1),
    ]


@pytest.mark.parametrize(
    ("size", "num_servers"),
    [
        (1, 1),
        (2, 2),
        (3, 3),
        *(pytest.param(size, num, marks=pytest.mark.soak) for size in range(1, 5) for num in (1, 2, 3) if size != num),
    ],
)
def test_a_synchronous_training_has_the_numbers_of_one_process(
    torch_pools: PartPools, servers: RunningServers, size: int, num_servers: int
) -> None:
    own = cases(num_servers)
    outcomes = torch_pools.get(size).run(with_servers, (servers.directory.port, training.all_trained, own))
    for number, (_, optimizer, passes) in enumerate(own):
        expected = training.alone(optimizer, 5, passes)
        for rank, found in enumerate(outcomes):
            assert training.error(found[number], expected) <= LIMIT, (own[number], rank)


def test_servers_give_the_bits_of_shared_memory_run_after_run(torch_pools: PartPools, servers: RunningServers) -> None:
    lines = [
        f"parameter_server=sync:servers=2:{SMALL}",
        f"parameter_server=async:staleness=0:servers=2:{SMALL}",
        f"parameter_server=sync:{SMALL}",
        f"parameter_server=sync:servers=2:{SMALL}",
        f"parameter_server=sync:servers=2:replicas=1:{SMALL}",
    ]
    own = [(line, "adamw", 1) for line in lines]
    outcomes = torch_pools.get(3).run(with_servers, (servers.directory.port, training.all_trained, own))
    first = outcomes[0][0]
    for found in outcomes:
        for line, other in zip(lines, found, strict=True):
            assert all(np.array_equal(first[name], other[name]) for name in first), line


@pytest.mark.parametrize("options", ["", ":staleness=1", ":modulate=staleness:scale=none", ":push=delta:push_every=2"])
def test_an_asynchronous_training_comes_as_far(torch_pools: PartPools, servers: RunningServers, options: str) -> None:
    own = [(f"parameter_server=async:servers=2:{SMALL}{options}", "adamw", 1)]
    outcomes = torch_pools.get(2).run(with_servers, (servers.directory.port, training.all_trained, own))
    start, whole = training.alone("adamw", 0), training.alone("adamw", 5)
    for (found,) in outcomes:
        assert 0.1 < training.error(found, start) / training.error(whole, start) < 5


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_checkpoints_go_from_here_to_data_and_back(
    torch_pools: PartPools, servers: RunningServers, tmp_path: Path, strategy: str
) -> None:
    own, pool, port = f"parameter_server={strategy}:servers=2:{SMALL}", torch_pools.get(2), servers.directory.port
    saved = pool.run(with_servers, (port, training.saved, own, "adamw", str(tmp_path / "own"), 3))
    assert training.error(*saved) == 0.0, "the ranks were made equal"
    loaded = pool.run(training.continued, ("data", "adamw", str(tmp_path / "own"), 0))
    assert training.error(loaded[0], saved[0]) == 0.0
    if strategy == "sync":
        there = pool.run(training.continued, ("data", "adamw", str(tmp_path / "own"), 3))
        here = pool.run(with_servers, (port, training.continued, own, "adamw", str(tmp_path / "own"), 3))
        assert training.error(there[0], here[0]) <= LIMIT


def test_without_servers_of_a_launcher_the_error_says_so(torch_pools: PartPools) -> None:
    with pytest.raises(Exception, match="unidist launch"):
        torch_pools.get(1).run(training.trained, ("parameter_server=async:servers=1", "sgd", 1))
