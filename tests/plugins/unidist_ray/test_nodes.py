"""`RayExecutor` on several nodes that come and go: engines, placement, lost nodes, and elastic jobs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster_training import assert_equal_to_one_process, train

from unidist.errors import ConfigurationError, RemoteError
from unidist_ray import RayExecutor

ray = pytest.importorskip("ray", reason="ray is not installed; `make test-integrations` has it")

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

_STORE_BYTES = 80 << 20


@pytest.fixture
def cluster(_ray_variables: None) -> Iterator[Any]:
    """A head without CPUs, and two nodes with two each."""
    from ray.cluster_utils import Cluster

    others = _processes_of_unidist()  # pools that earlier tests of this process keep
    ray.shutdown()
    made = Cluster(initialize_head=True, head_node_args=_node(0))
    for _ in range(2):
        made.add_node(**_node(2))
    ray.init(address=made.address)
    made.wait_for_nodes()
    yield made
    ray.shutdown()
    made.shutdown()
    left = _processes_of_unidist() - others
    assert not left, [_command(process) for process in left]


def test_ranks_of_a_node_share_memory_those_of_two_use_tcp_and_a_lost_node_is_named(cluster: Any) -> None:
    with RayExecutor(num_hosts=2, num_workers_per_host=2) as executor:
        executor.start()
        places = executor.run(_place)
        assert [place[:4] for place in places] == [
            (0, 0, 0, "tcp"),
            (1, 1, 0, "tcp"),
            (2, 0, 1, "tcp"),
            (3, 1, 1, "tcp"),
        ]
        assert all("shm" in place[4] for place in places)
        assert_equal_to_one_process(executor.run(train, [3], {"strategy": "zero=2"}), 3)
        nodes = executor.run(_node_id)
        assert (nodes[0] == nodes[1], nodes[2] == nodes[3], nodes[0] == nodes[2]) == (True, True, False)
        here = ray.get_runtime_context().get_node_id()  # which has to stay, see below
        lost = next(node for node in cluster.worker_nodes if node.node_id in nodes and node.node_id != here)
        references = executor.run_remote(time.sleep, [0])
        ray.get(references)
        cluster.remove_node(lost)
        with pytest.raises(RemoteError, match=r"rank [0-3] \(pid \d+, node .*\) died"):
            executor.run(_wait_for_the_others)
    executor = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=1), num_hosts=2)
    with pytest.raises(ConfigurationError, match="each on a node of its own"):
        executor.start()


def test_an_elastic_job_goes_on_when_a_rank_and_a_node_are_lost_and_grows_again(cluster: Any, tmp_path: Path) -> None:
    executor = RayExecutor(min_workers=1, max_workers=4, cooldown_range=(0.5, 1))
    executor.start(extra_env_vars={"UNIDIST_HEARTBEAT_SEC": "5"})
    import threading

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(executor.run(_train_elastically, [str(tmp_path)])))
    thread.start()
    try:
        _await(tmp_path, "size-4", thread)
        (tmp_path / "kill-a-rank").touch()
        _await(tmp_path, "killed", thread)
        # All nodes have one address here, so this process may be connected to any of them. That has to stay.
        here = ray.get_runtime_context().get_node_id()
        lost = next(node for node in cluster.worker_nodes if node.node_id != here)
        cluster.remove_node(lost)
        _await(tmp_path, "size-2", thread)
        cluster.add_node(**_node(2))
        (tmp_path / "await-4").touch()
        thread.join(240)
        assert not thread.is_alive()
    finally:
        (tmp_path / "stop").touch()
        thread.join(60)
        executor.shutdown()
    assert [each["rank"] for each in found[0]] == [0, 1, 2, 3]
    assert all(each["weights"] == found[0][0]["weights"] for each in found[0])


def test_an_elastic_job_that_fails_says_why(cluster: Any) -> None:
    with RayExecutor(min_workers=2, max_workers=2, reset_limit=0) as executor:
        executor.start()
        with pytest.raises(RemoteError, match=r"raised ZeroDivisionError: division by zero"):
            executor.run(_divide)


def _node(cpus: int) -> dict[str, Any]:
    return {"num_cpus": cpus, "object_store_memory": _STORE_BYTES, "include_dashboard": False}


def _place() -> tuple[Any, ...]:
    from unidist.runtime import init

    context = init()
    place = context.topology
    return place.rank, place.local_rank, place.node_rank, context.engine.spec.name, context.world.description


def _node_id() -> str:
    found: str = ray.get_runtime_context().get_node_id()
    return found


def _wait_for_the_others() -> None:
    import torch

    import unidist.torch as ud

    ud.init()
    ud.allreduce(torch.zeros(1))
    time.sleep(600)


def _divide() -> float:
    import unidist.torch as ud

    ud.init()
    return 1 / 0


def _train_elastically(folder: str) -> dict[str, Any]:
    """Train until there are four ranks again; one of four kills itself when it is asked to."""
    import torch

    import unidist.torch as ud

    ud.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = ud.distribute(model, optimizer)
    state = ud.elastic.TorchState(model, optimizer, step=0)

    @ud.elastic.run
    def loop(state: Any) -> None:
        while not os.path.exists(f"{folder}/stop"):
            open(f"{folder}/size-{ud.size()}", "w").close()
            ask = f"{folder}/kill-a-rank"
            if ud.size() == 4 and ud.rank() == 1 and os.path.exists(ask) and not os.path.exists(f"{folder}/killed"):
                open(f"{folder}/killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            if os.path.exists(f"{folder}/killed") and ud.size() <= 2:
                open(f"{folder}/shrunk", "w").close()
            optimizer.zero_grad()
            model(torch.ones(4, 3, dtype=torch.float64)).pow(2).mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()
            is_done = ud.size() == 4 and os.path.exists(f"{folder}/await-4")
            if ud.allreduce(torch.tensor([float(is_done)]), op=ud.Sum)[0] == 4:
                return
            time.sleep(0.1)

    loop(state)
    return {"rank": ud.rank(), "weights": [value.tolist() for value in model.parameters()]}


def _await(folder: Path, name: str, thread: Any) -> None:
    deadline = time.monotonic() + 240
    while not (folder / name).exists():
        assert thread.is_alive(), "the job has ended"
        assert time.monotonic() < deadline, f"no {name}; there are {sorted(os.listdir(folder))}"
        time.sleep(0.1)


def _processes_of_unidist() -> set[psutil.Process]:
    return {process for process in psutil.Process().children(recursive=True) if "unidist" in _command(process)}


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
