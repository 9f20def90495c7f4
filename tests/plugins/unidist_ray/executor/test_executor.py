"""`RayExecutor` on a local cluster: results, numbers, failures, and nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from unidist.errors import ConfigurationError, RemoteError, UsageError
from unidist_ray import ElasticRayExecutor, RayExecutor, RayHostDiscovery

ray = pytest.importorskip("ray", reason="ray is not installed; `make test-integrations` has it")

pytestmark = [pytest.mark.parallel, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


def test_three_lines_run_a_function_on_all_ranks() -> None:
    executor = RayExecutor(num_workers=2)
    executor.start()
    try:
        assert executor.run(_place, ["a"], {"b": 1}) == [("a", 1, rank, 2, rank, "shm") for rank in range(2)]
        assert ray.get(executor.run_remote(_place, ["a"], {"b": 2}))[1][1:4] == (2, 1, 2)
    finally:
        executor.shutdown()
    executor.shutdown()
    with pytest.raises(UsageError, match=r"not started; call start\(\) first"):
        executor.run(_place)


def test_each_rank_keeps_an_object() -> None:
    with RayExecutor(num_workers=2) as executor:
        executor.start(Counter, [10], {"step": 2}, extra_env_vars={"MY_OWN": "x"})
        assert executor.execute(lambda counter: counter.count()) == [(12, "x", 0), (12, "x", 1)]
        assert executor.execute_single(lambda counter: counter.count()) == (14, "x", 0)
        assert executor.execute(lambda counter: counter.count()) == [(16, "x", 0), (14, "x", 1)]


def test_an_object_that_cannot_be_made_is_an_error_that_names_the_rank() -> None:
    executor = RayExecutor(num_workers=2)
    with pytest.raises(RemoteError, match="rank 0 raised TypeError"):
        executor.start(Counter, ["a", "b", "c", "d"])
    with pytest.raises(UsageError, match="not started"):
        executor.run(_place)


def test_callbacks_get_what_ranks_log_while_they_run(tmp_path: Path) -> None:
    found: list[Any] = []
    seen = tmp_path / "seen"
    with RayExecutor(num_workers=2) as executor:
        executor.start()
        has_seen = executor.run(_log, [str(seen)], callbacks=[found.append, lambda _: seen.touch()])
        assert sorted(found, key=str) == [{"rank": rank, "step": step} for rank in range(2) for step in range(3)]
        assert has_seen == [True, True]  # while they were still running
        assert executor.execute(lambda _: 1, callbacks=[found.append]) == [1, 1]
        with pytest.raises(UsageError, match="3 cannot be called"):
            executor.run(_log, [""], callbacks=[3])
        with pytest.raises(ZeroDivisionError):
            executor.run(_log, [""], callbacks=[lambda _: 1 / 0])
        with pytest.raises(UsageError, match="a call of it was interrupted"):
            executor.run(_sum)


def test_an_elastic_job_has_callbacks_too() -> None:
    found: list[Any] = []
    executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=2))
    executor.start()
    assert len(executor.run(_log_three, callbacks=[found.append])) == 2
    assert sorted(found, key=str) == [{"rank": rank, "step": step} for rank in range(2) for step in range(3)]


class _OneSlot(RayHostDiscovery):
    """Room for one rank on each node, though there are four CPUs."""

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return dict.fromkeys(super().find_available_hosts_and_slots(), 1)


def test_a_discovery_says_which_nodes_an_elastic_job_may_use() -> None:
    settings = ElasticRayExecutor.create_settings()
    with pytest.raises(ConfigurationError, match=r"override_discovery=False, min_workers=1, settings\.discovery=None"):
        ElasticRayExecutor(settings, override_discovery=False)
    settings.discovery = _OneSlot()
    with pytest.raises(ConfigurationError, match="it is for elastic jobs"):
        RayExecutor(settings, num_workers=2, override_discovery=False)
    executor = ElasticRayExecutor(settings, override_discovery=False)
    executor.start()
    assert len(executor.run(_log_three)) == 1


def test_gpus_of_a_node_are_seen_by_all_its_ranks() -> None:
    with RayExecutor(num_workers=2, use_gpu=True) as executor:
        executor.start()
        assert {tuple(sorted(each)) for each in executor.run(_visible_gpus)} == {("0", "1")}


def test_the_error_of_the_rank_that_failed_comes_out_and_the_executor_stays_usable() -> None:
    with RayExecutor(num_workers=2) as executor:
        executor.start()
        for _ in range(2):
            with pytest.raises(RemoteError, match=r"^rank 1 raised ZeroDivisionError") as failed:
                executor.run(_fail_on, [1])
            assert isinstance(failed.value.__cause__, ZeroDivisionError)
            assert "rank 0 raised unidist.errors.PeerLostError" in str(failed.value)
            assert executor.run(_sum) == [3.0, 3.0]


def test_a_killed_rank_is_named_and_nothing_is_left() -> None:
    with RayExecutor(num_workers=2) as executor:
        executor.start()
        pids = executor.run(os.getpid)
        began = time.monotonic()
        with pytest.raises(RemoteError, match=rf"rank 1 \(pid {pids[1]}, node .*\) died .* during _kill\(\)"):
            executor.run(_kill, [1])
        assert time.monotonic() - began < 300  # the others would sleep for longer
        with pytest.raises(UsageError, match=r"it lost ranks \[1\]"):
            executor.run(_sum)


def test_actors_that_do_not_start_in_time_are_an_error_and_end() -> None:
    settings = RayExecutor.create_settings(timeout_s=0.01)
    with pytest.raises(ConfigurationError, match=r"not all of 2 actors of Ray have started within 0.01 seconds"):
        RayExecutor(settings, num_workers=2).start()


def test_no_room_says_what_there_is() -> None:
    settings = RayExecutor.create_settings(placement_group_timeout_s=1)
    with pytest.raises(ConfigurationError, match=r"no room for 9 workers .*The cluster has 4 CPU, 2 GPU; "):
        RayExecutor(settings, num_workers=9).start()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "how many workers"),
        ({"num_workers": 0}, "at least 1"),
        ({"num_workers": 3, "num_hosts": 2}, "leave num_workers out"),
        ({"num_workers": 1, "gpus_per_worker": 1}, "without use_gpu"),
    ],
)
def test_numbers_that_do_not_go_together_are_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RayExecutor(**arguments)


class Counter:
    def __init__(self, start: int, step: int = 1) -> None:
        self._number, self._step = start, step

    def count(self) -> tuple[int, str, int]:
        self._number += self._step
        return self._number, os.environ["MY_OWN"], int(os.environ["RANK"])


def _log(seen: str) -> bool:
    """Log, and wait until there is a file that tells that it was seen; return whether it came."""
    from unidist.runtime import init
    from unidist_ray import ray_logger

    rank = init().topology.rank
    for step in range(3):
        ray_logger.log({"rank": rank, "step": step})
    deadline = time.monotonic() + 60
    while seen and not os.path.exists(seen) and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.path.exists(seen)


def _log_three() -> bool:
    return _log("")


def _place(a: str, b: int) -> tuple[Any, ...]:
    from unidist.runtime import init

    context = init()
    place = context.topology
    return a, b, place.rank, place.world_size, place.local_rank, context.engine.spec.name


def _sum() -> float:
    import torch

    import unidist.torch as ud

    ud.init()
    return float(ud.allreduce(torch.tensor([ud.rank() + 1.0]), op=ud.Sum)[0])


def _fail_on(rank: int) -> float:
    import unidist.torch as ud

    ud.init()
    if ud.rank() == rank:
        return 1 / 0
    return _sum()


def _kill(rank: int) -> float:
    import unidist.torch as ud

    ud.init()
    if ud.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return _sum()


def _visible_gpus() -> list[str]:
    return os.environ["CUDA_VISIBLE_DEVICES"].split(",")
