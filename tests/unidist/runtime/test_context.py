"""The context: one per process, made by init, ended by shutdown."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from unidist.errors import ConfigurationError, NotInitializedError, PeerLostError, RemoteError, UsageError
from unidist.jobs.pool.pool import RankPool
from unidist.mesh import Mesh
from unidist.runtime import context
from unidist.settings.environment import Settings
from unidist.strategy import GradientOwner, UpdateGate
from unidist.strategy.interface import Plan, Strategy
from unidist.testing.fixtures import RankPoolFactory

pytestmark = pytest.mark.usefixtures("leak_check")


class Tall(Strategy):
    """Claims an axis of two ranks."""

    name = "tall"
    axis = "tall"

    @property
    def axis_size(self) -> int:
        return 2


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    context.shutdown()


def test_before_init_there_is_none() -> None:
    assert not context.is_initialized()
    with pytest.raises(NotInitializedError, match=r"call init\(\) first"):
        context.current()


def test_alone_it_is_a_job_of_one_process() -> None:
    runtime = context.init(Settings())
    assert context.current() is runtime
    assert (runtime.topology.rank, runtime.topology.world_size, runtime.engine.spec.name) == (0, 1, "single")
    assert runtime.axis_size("data") == 1
    assert runtime.world.size == 1


def test_init_again_returns_the_same_and_shutdown_ends_it() -> None:
    first = context.init(Settings())
    assert context.init() is first
    context.shutdown()
    context.shutdown()
    assert not context.is_initialized()
    assert context.init(Settings()) is not first


def test_a_failed_init_leaves_nothing_and_can_be_repeated() -> None:
    threads = threading.active_count()
    with pytest.raises(ConfigurationError, match="unknown engine 'nonsense'"):
        context.init(Settings(engine="nonsense"))
    with pytest.raises(ConfigurationError, match="unknown strategy 'nonsense'"):
        context.init(Settings(strategy="nonsense"))
    assert not context.is_initialized()
    assert threading.active_count() == threads
    context.init(Settings())


def test_the_plan_of_a_call_must_fit_the_mesh_of_the_launch() -> None:
    runtime = context.init(Settings())
    assert runtime.plan_for(None) is runtime.plan
    assert [item.name for item in runtime.plan_for("accumulate=2").strategies] == ["accumulate", "data"]
    with pytest.raises(ConfigurationError):
        runtime.plan_for("data=2")


def test_the_default_owner_of_gradients_is_data_and_a_gate_is_found() -> None:
    runtime = context.init(Settings(strategy="accumulate=3"))
    assert runtime.plan.the(GradientOwner).__class__.__name__ == "DataParallel"
    gate = runtime.plan.find(UpdateGate)
    assert gate is not None
    assert gate.passes_per_update == 3
    assert runtime.plan_for("identity").find(UpdateGate) is None


def test_a_timeline_is_written_and_closed(tmp_path: Path) -> None:
    context.init(Settings(timeline=tmp_path / "trace.%r.json"))
    context.shutdown()
    assert (tmp_path / "trace.0.json").exists()


def test_what_fails_to_close_leaves_nothing_else_open(tmp_path: Path) -> None:
    class Failing:
        def __init__(self, runtime: context.Context) -> None:
            self.runtime = runtime

        def close(self) -> None:
            raise OSError("the disk is gone")

    runtime = context.init(Settings(timeline=tmp_path / "trace.json"))
    runtime.owned(Failing)
    with pytest.raises(OSError, match="the disk is gone"):
        context.shutdown()
    assert runtime.timeline is None
    assert not context.is_initialized()


def test_a_forked_child_has_no_runtime_and_takes_nothing_from_its_parent() -> None:
    runtime = context.init(Settings())
    child = os.fork()
    if child == 0:
        os._exit(0 if not context.is_initialized() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert context.current() is runtime


def test_axes_are_cached_and_new_communicators_are_not(rank_pool: RankPoolFactory) -> None:
    def main() -> tuple[bool, bool, tuple[int, ...]]:
        runtime = context.init()
        one, same = runtime.axis("data"), runtime.axis("data")
        other = runtime.new_communicator("data")
        outcome = (one is same, one is other, other.members)
        context.shutdown()
        return outcome

    assert rank_pool(3).run(main) == [(True, False, (0, 1, 2))] * 3


def test_groups_of_axes_are_formed_once_and_then_work_by_themselves(rank_pool: RankPoolFactory) -> None:
    def main() -> tuple[tuple[int, ...], tuple[int, ...], list[int]]:
        runtime = context.init()
        runtime.plan = Plan(runtime.plan.strategies, Mesh({"data": 2, "tensor": 2}, world_size=4))
        runtime.divide()
        rank = runtime.topology.rank
        places = [runtime.axis_rank(name) for name in ("data", "tensor", "pipeline")]
        # Only the ranks of the first group make another one: the others are not asked.
        tensor = runtime.new_communicator("tensor") if rank < 2 else runtime.axis("tensor")
        tensor.barrier().wait()
        outcome = tensor.members, runtime.axis("data").members, places
        runtime.world.barrier().wait()
        context.shutdown()
        return outcome

    assert rank_pool(4).run(main) == [
        ((0, 1), (0, 2), [0, 0, 0]),
        ((0, 1), (1, 3), [0, 1, 0]),
        ((2, 3), (0, 2), [1, 0, 0]),
        ((2, 3), (1, 3), [1, 1, 0]),
    ]


def test_a_rank_that_cannot_go_on_ends_what_all_others_wait_for(rank_pool: RankPoolFactory) -> None:
    def main() -> str:
        runtime = context.init()
        own = runtime.new_communicator("data")
        try:
            if runtime.topology.rank == 1:
                runtime.abort("rank 1 cannot go on: out of luck")
                runtime.abort("again")
            own.barrier().wait()
        except PeerLostError as exc:
            return str(exc)
        finally:
            context.shutdown()
        return ""

    told = rank_pool(3).run(main)
    assert all("rank 1 cannot go on: out of luck" in each for each in told)


def test_a_script_may_choose_the_mesh_once_before_anything_runs_on_it(rank_pool: RankPoolFactory) -> None:
    def main() -> tuple[list[dict[str, int]], str]:
        runtime = context.init()
        meshes = [runtime.plan.mesh.axes, runtime.plan_for(Tall()).mesh.axes, runtime.plan.mesh.axes]
        runtime.divide()
        try:
            runtime.plan_for("data")
        except UsageError as exc:
            return meshes, str(exc)
        finally:
            context.shutdown()
        return meshes, ""

    [(meshes, told), _] = rank_pool(2).run(main)
    assert meshes == [{"data": 2}, {"data": 1, "tall": 2}, {"data": 1, "tall": 2}]
    assert "runs on Mesh(data=1, tall=2) already" in told


def test_every_operation_of_the_world_ends_with_shutdown(rank_pool: RankPoolFactory) -> None:
    def main() -> bool:
        world = context.init().world
        context.shutdown()
        try:
            world.barrier()
        except UsageError:
            return True
        return False

    assert rank_pool(2).run(main) == [True, True]


def test_a_rank_that_does_not_come_to_init_is_named() -> None:
    def main() -> None:
        if os.environ["UNIDIST_RANK"] != "1":
            context.init()

    told = pytest.raises(RemoteError, match=r"StalledError: init: rank 1 of 3 did not come in time")
    with RankPool(3, env={"UNIDIST_START_TIMEOUT_SEC": "2"}, timeout=timedelta(seconds=90)) as pool, told:
        pool.run(
            lambda: bool(importlib.import_module("unidist.runtime.context"))
        )  # from here on the others come in time
        pool.run(main)


def test_ranks_with_different_engines_are_told_so() -> None:
    def main() -> None:
        if os.environ["UNIDIST_RANK"] == "1":
            os.environ["UNIDIST_ENGINE"] = "gloo"
        context.init()

    told = pytest.raises(RemoteError, match="rank 0: shm, rank 1: gloo")
    with RankPool(2, env={"UNIDIST_ENGINE": "shm"}, timeout=timedelta(seconds=90)) as pool, told:
        pool.run(main)
