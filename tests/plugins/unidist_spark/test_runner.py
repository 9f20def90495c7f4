"""`run` on Spark: results in rank order, failures that end the stage, and nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from unidist.errors import ConfigurationError, RemoteError, UsageError
from unidist_spark import HorovodRunner, run

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

StartSpark = Callable[[str], Any]
MASTERS = ("local[2]", "local-cluster[2,1,1024]")


@pytest.mark.parametrize("master", MASTERS)
def test_one_line_runs_a_function_on_all_ranks(start_spark: StartSpark, master: str) -> None:
    start_spark(master)
    placed = run(_place, ["a"], {"b": 1}, num_proc=2, env={"MY_OWN": "x"})
    assert placed == [("a", 1, "x", rank, 2, 3.0, "shm") for rank in range(2)]
    assert [each[3] for each in run(_place, ["a"], {"b": 1}, env={"MY_OWN": "x"}, engine="tcp")] == [0, 1]


@pytest.mark.parametrize("master", MASTERS)
def test_the_error_of_the_rank_that_failed_comes_out_and_the_others_are_ended(
    start_spark: StartSpark, master: str
) -> None:
    start_spark(master)
    began = time.monotonic()
    with pytest.raises(RemoteError, match=r"^rank 1 raised ZeroDivisionError: division by zero") as failed:
        run(_fail_beside_a_rank_that_sleeps, num_proc=2)
    assert time.monotonic() - began < 300  # the others would sleep for longer
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    assert failed.value.rank == 1
    _assert_no_ranks()


@pytest.mark.parametrize("master", MASTERS)
def test_a_killed_rank_is_named(start_spark: StartSpark, master: str) -> None:
    start_spark(master)
    with pytest.raises(
        RemoteError, match=r"rank 1 \(pid \d+\) died \(killed by signal 9 \(SIGKILL\)\) during _kill\(\)"
    ):
        run(_kill, [1], num_proc=2)
    _assert_no_ranks()
    assert run(_sum, num_proc=2) == [3.0, 3.0]


def test_an_executor_that_dies_ends_the_job_and_nothing_runs_again(start_spark: StartSpark, tmp_path: Any) -> None:
    start_spark("local-cluster[2,1,1024]")
    with pytest.raises(RemoteError, match=r"the rank of Spark's task \d was lost during _kill_the_executor"):
        run(_kill_the_executor, [str(tmp_path / "began")], num_proc=2)
    assert (tmp_path / "began").read_text() == "x"
    _assert_no_ranks()


def test_too_few_slots_are_an_error_after_the_start_timeout(start_spark: StartSpark) -> None:
    start_spark("local[2]")
    with pytest.raises(ConfigurationError, match="did not start 3 tasks at the same time in 2 s; it has 2 slots"):
        run(_sum, num_proc=3, start_timeout=2)


def test_horovod_runner_returns_what_rank_0_does(start_spark: StartSpark) -> None:
    start_spark("local[2]")
    assert HorovodRunner(np=2).run(_place, a="a", b=1)[:2] == ("a", 1)
    assert HorovodRunner(np=0).run(_sum) == 3.0
    assert HorovodRunner(np=-2).run(_sum) == 3.0
    with pytest.raises(ConfigurationError, match="driver_log_verbosity='all' cannot be followed"):
        HorovodRunner(np=2, driver_log_verbosity="all")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_mpi": True}, "use_mpi=True cannot be followed: Spark starts the ranks"),
        ({"executable": "python4"}, "set PYSPARK_PYTHON"),
        ({"num_proc": 0}, "at least 1"),
    ],
)
def test_arguments_that_cannot_be_followed_are_errors(
    start_spark: StartSpark, arguments: dict[str, Any], message: str
) -> None:
    start_spark("local[2]")
    with pytest.raises(ConfigurationError, match=message):
        run(_sum, **arguments)


def _place(a: str, b: int) -> tuple[Any, ...]:
    from unidist.runtime import init

    context = init()
    place = context.topology
    return a, b, os.environ.get("MY_OWN"), place.rank, place.world_size, _sum(), context.engine.spec.name


def _sum() -> float:
    import torch

    import unidist.torch as ud

    ud.init()
    return float(ud.allreduce(torch.tensor([ud.rank() + 1.0]), op=ud.Sum)[0])


def _fail_beside_a_rank_that_sleeps() -> float:
    import unidist.torch as ud

    ud.init()
    if ud.rank() == 1:
        return 1 / 0
    time.sleep(600)
    raise AssertionError("it should have been ended")


def _kill(rank: int) -> float:
    import unidist.torch as ud

    ud.init()
    if ud.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return _sum()


def _kill_the_executor(began: str) -> float:
    import unidist.torch as ud

    ud.init()
    if ud.rank() == 1:
        with open(began, "a") as file:
            file.write("x")
        for parent in psutil.Process().parents():
            if "CoarseGrainedExecutorBackend" in " ".join(parent.cmdline()):
                parent.kill()
    time.sleep(600)
    raise AssertionError("it should have been ended")


def _assert_no_ranks() -> None:
    deadline = time.monotonic() + 60
    while left := _ranks():
        assert time.monotonic() < deadline, f"ranks are left: {left}"
        time.sleep(0.1)


def _ranks() -> list[str]:
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "environ"]):
        if "unidist.jobs.pool.worker" in " ".join(process.info["cmdline"] or ()) and "SPARK_LOCAL_IP" in (
            process.info["environ"] or {}
        ):
            found.append(f"{process.pid} {process.info['cmdline']}")
    return found


def test_without_spark_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark import SparkContext

    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    with pytest.raises(UsageError, match="needs a running Spark"):
        run(_sum)
