"""The job that takes over from one with too few ranks for its model."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from unidist.launcher import DurableOptions, ElasticLimits, Fallback, Host, Job
from unidist.mesh import Mesh
from unidist_launch.elastic_job.fallback import fallback_of, run_elastic

MESHES = {num: Mesh({"data": None, "tensor": 2}, world_size=num) for num in (2, 4)}


def job(*hosts: Host, strategy: str = "tensor=2,zero=1") -> Job:
    limits = ElasticLimits(
        min_num=4,
        max_num=8,
        durable=DurableOptions(Path("run")),
        mesh=Mesh({"pipeline": 4, "data": None}, world_size=4),
        fallback=Fallback(strategy, MESHES),
    )
    return Job(("train.py",), 4, env={"A": "b"}, hosts=hosts, elastic=limits)


def test_as_many_ranks_go_on_as_the_other_strategy_fits() -> None:
    found = fallback_of(job(), 3, ["localhost"])
    assert found is not None
    assert found.elastic is not None
    assert found.num_proc == found.elastic.min_num == 2
    assert found.env == {"A": "b", "UNIDIST_STRATEGY": "tensor=2,zero=1"}
    assert found.elastic.replica_size == 2
    assert found.elastic.fallback is None
    assert found.elastic.slots_per_host == 4  # as many slots as before
    assert found.elastic.durable == DurableOptions(Path("run"))


def test_hosts_that_are_lost_are_not_among_those_of_the_other_job() -> None:
    found = fallback_of(job(Host("a", 2), Host("b", 2)), 2, ["b"])
    assert found is not None
    assert found.hosts == (Host("b", 2),)


def test_without_enough_processes_or_a_strategy_there_is_none() -> None:
    assert fallback_of(job(), 1, ["localhost"]) is None
    assert fallback_of(Job(("train.py",), 4, elastic=ElasticLimits(4, 8)), 3, ["localhost"]) is None


def test_the_other_job_runs_when_all_of_the_first_was_given_back() -> None:
    seen: list[object] = []

    class Run:
        def __init__(self, each: Job, stack: ExitStack) -> None:
            stack.callback(seen.append, "given back")
            self.job = each
            self.fallback = fallback_of(each, 3, ["localhost"])

        def run(self) -> int:
            seen.append(self.job.num_proc)
            return 0 if self.fallback is not None else 3

    assert run_elastic(job(), Run) == 3
    assert seen == [4, "given back", 2, "given back"]
