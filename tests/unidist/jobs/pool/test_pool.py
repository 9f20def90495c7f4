"""RankPool and unidist.run: results, errors, deaths and timeouts, and nothing left behind."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

import unidist
from unidist.errors import ConfigurationError, PeerLostError, RemoteError, StalledError, UsageError
from unidist.jobs.pool.pool import RankPool

pytestmark = pytest.mark.parallel

SHORT = timedelta(seconds=60)


@dataclass
class Point:
    """A class of a module that workers cannot import: it has to travel with the call."""

    x: int


class OddError(Exception):
    """Cannot be rebuilt from its arguments."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first}+{second}")


def rank() -> int:
    return int(os.environ["UNIDIST_RANK"])


def times_rank(factor: int, *, plus: int = 0) -> int:
    return factor * rank() + plus


@pytest.fixture
def pool() -> Iterator[RankPool]:
    with RankPool(3, timeout=SHORT) as made:
        yield made


def test_results_come_in_rank_order() -> None:
    assert unidist.run(times_rank, (10,), {"plus": 1}, num_proc=3) == [1, 11, 21]


def test_lambdas_closures_partials_and_local_classes_travel(pool: RankPool) -> None:
    offset = 100
    assert pool.run(lambda: rank() + offset) == [100, 101, 102]
    assert pool.run(functools.partial(times_rank, 2)) == [0, 2, 4]
    assert pool.run(lambda point: Point(point.x + rank()), (Point(1),)) == [Point(1), Point(2), Point(3)]


def test_functions_of_main_travel(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, unidist
            OFFSET = 5
            def helper(): return OFFSET
            def work(): return helper() + int(os.environ["RANK"])
            if __name__ == "__main__":
                print(unidist.run(work))
            """
        )
    )
    out = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=180, check=False)
    assert (out.stdout, out.stderr) == ("[5, 6]\n", "")


def test_modules_on_the_parents_search_path_are_found(
    pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unidist_test_only_here.py").write_text("def answer(): return 42\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    from unidist_test_only_here import answer  # type: ignore[import-not-found]

    with RankPool(1, timeout=SHORT) as fresh:
        assert fresh.run(answer) == [42]


def test_each_rank_gets_its_own_arguments(pool: RankPool) -> None:
    assert pool.run(lambda a, b: (a, b), ("a",), per_rank_args=[(0,), (1,), (2,)]) == [("a", 0), ("a", 1), ("a", 2)]
    with pytest.raises(UsageError, match="2 items for 3 ranks"):
        pool.run(times_rank, per_rank_args=[(0,), (1,)])


def test_ranks_keep_their_state_and_processes_between_calls(pool: RankPool) -> None:
    pool.run(lambda: os.environ.__setitem__("KEPT", str(rank())))
    assert pool.run(lambda: os.environ["KEPT"]) == ["0", "1", "2"]
    assert tuple(pool.run(os.getpid)) == pool.pids


def test_messages_larger_than_any_socket_buffer(pool: RankPool) -> None:
    sent = os.urandom(10_000_000)
    assert pool.run(lambda data: data + bytes([rank()]), (sent,)) == [sent + bytes([i]) for i in range(3)]


def test_environment_and_engine_reach_the_ranks() -> None:
    with RankPool(1, env={"MORE": "1"}, engine="shm", timeout=SHORT) as pool:
        assert pool.run(lambda: (os.environ["MORE"], os.environ["UNIDIST_ENGINE"])) == [("1", "shm")]


def test_an_exception_names_its_rank_and_the_pool_goes_on(pool: RankPool) -> None:
    def fail() -> None:
        if rank() == 1:
            raise ValueError("boom")

    with pytest.raises(RemoteError, match="rank 1 raised ValueError: boom") as caught:
        pool.run(fail)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)
    assert "in fail" in caught.value.remote_traceback
    assert caught.value.remote_traceback in str(caught.value)
    assert pool.run(rank) == [0, 1, 2]


def test_an_exception_that_cannot_travel_still_tells_its_text(pool: RankPool) -> None:
    def fail() -> None:
        raise OddError(1, 2)

    with pytest.raises(RemoteError, match=r"OddError: 1\+2") as caught:
        pool.run(fail)
    assert caught.value.__cause__ is None


def test_the_culprit_is_blamed_and_not_those_that_lost_it(pool: RankPool) -> None:
    def fail() -> None:
        if rank() == 2:
            time.sleep(0.2)  # the others answer first
            raise KeyError("the cause")
        raise PeerLostError("rank 2 is gone", ranks=[2])

    with pytest.raises(RemoteError, match=r"^rank 2 raised KeyError") as caught:
        pool.run(fail)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "rank 0 raised" in str(caught.value)


def test_ranks_that_wait_for_a_failed_one_are_ended(pool: RankPool) -> None:
    def fail() -> None:
        if rank() == 0:
            raise ValueError("boom")
        time.sleep(100)

    with pytest.raises(RemoteError, match="ranks 1, 2 did not answer and had to be ended"):
        pool.run(fail)
    assert not any(map(psutil.pid_exists, pool.pids))
    with pytest.raises(UsageError, match="it lost ranks"):
        pool.run(rank)


@pytest.mark.parametrize(
    ("last_act", "told"),
    [
        ("os.kill(os.getpid(), 9)", r"died \(killed by signal 9 \(SIGKILL\)\)"),
        ("os._exit(7)", r"died \(exit code 7\)"),
        ("sys.exit(3)", r"died \(exit code 3\)"),
    ],
)
def test_a_rank_that_dies_is_named_with_its_cause(last_act: str, told: str) -> None:
    started = time.monotonic()
    with RankPool(2, timeout=SHORT) as pool, pytest.raises(RemoteError, match=rf"^rank 1 \(pid \d+\) {told}") as caught:
        pool.run(lambda act: exec(f"import os, sys; {act}") if rank() == 1 else time.sleep(100), (last_act,))
    assert caught.value.rank == 1
    assert time.monotonic() - started < 50  # the other rank sleeps for longer
    assert not any(map(psutil.pid_exists, pool.pids))


def test_a_rank_killed_between_calls_is_noticed_at_the_next(pool: RankPool) -> None:
    pool.run(rank)
    pool.kill(2)
    with pytest.raises(RemoteError, match=r"rank 2 \(pid \d+\) died \(killed by signal 9"):
        pool.run(rank)


def test_a_rank_can_be_sent_any_signal(pool: RankPool) -> None:
    pool.run(lambda: signal.signal(signal.SIGUSR1, lambda *_: os.environ.__setitem__("GOT", "1")) and None)
    pool.kill(1, signal.SIGUSR1)
    deadline = time.monotonic() + 30
    while pool.run(lambda: os.environ.get("GOT")) != [None, "1", None]:
        assert time.monotonic() < deadline


def test_a_timeout_names_the_ranks_that_did_not_answer(pool: RankPool) -> None:
    pool.run(rank)  # from here on the ranks are up, however busy the machine
    with pytest.raises(StalledError, match=r"ranks 1, 2 of 3 did not answer .* within 2 s") as caught:
        pool.run(lambda: time.sleep(100 * rank()), timeout=timedelta(seconds=2))
    assert caught.value.ranks == (1, 2)
    assert not any(map(psutil.pid_exists, pool.pids))


def test_what_cannot_be_pickled_is_a_usage_error_and_the_pool_goes_on(pool: RankPool) -> None:
    with pytest.raises(UsageError, match="cannot send"):
        pool.run(lambda lock: lock, (threading.Lock(),))
    with pytest.raises(RemoteError, match="cannot pickle"):
        pool.run(lambda: threading.Lock())
    assert pool.run(rank) == [0, 1, 2]


def test_a_closed_pool_says_so() -> None:
    with RankPool(1) as pool:
        pass
    with pytest.raises(UsageError, match="it was closed"):
        pool.run(rank)


def test_ranks_end_as_scripts_do_with_their_exit_handlers(tmp_path: Path) -> None:
    def register(folder: str) -> None:
        import atexit

        atexit.register(lambda: Path(folder, str(rank())).touch())

    with RankPool(2, timeout=SHORT) as pool:
        pool.run(register, (str(tmp_path),))
    assert sorted(item.name for item in tmp_path.iterdir()) == ["0", "1"]


def test_an_interrupted_call_ends_the_pool() -> None:
    previous = signal.signal(signal.SIGALRM, _interrupt)
    try:
        with RankPool(2, timeout=SHORT) as pool:
            signal.setitimer(signal.ITIMER_REAL, 1)
            with pytest.raises(KeyboardInterrupt):
                pool.run(time.sleep, (100,))
            assert not any(map(psutil.pid_exists, pool.pids))
    finally:
        signal.signal(signal.SIGALRM, previous)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_pool_made_and_used_in_a_thread_that_ends_lives_on() -> None:
    pools: list[RankPool] = []
    thread = threading.Thread(target=lambda: pools.append(RankPool(1, timeout=SHORT)))
    thread.start()
    thread.join()
    with pools[0] as pool:
        assert pool.run(rank) == [0]


def test_workers_die_with_a_killed_parent() -> None:
    code = """
        import time
        from unidist.jobs.pool.pool import RankPool
        pool = RankPool(2)
        print(*pool.pids, flush=True)
        pool.run(time.sleep, (100,))
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.kill()
        deadline = time.monotonic() + 30
        while any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_many_runs_leave_no_descriptor_process_or_thread() -> None:
    unidist.run(rank)
    descriptors = sorted(os.listdir("/proc/self/fd"))
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    threads = threading.active_count()
    for _ in range(12):
        assert unidist.run(rank) == [0, 1]
    assert sorted(os.listdir("/proc/self/fd")) == descriptors
    assert {child.pid for child in psutil.Process().children(recursive=True)} == children
    assert threading.active_count() == threads


def test_wrong_names_are_found_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown engine 'shmm'. Did you mean 'shm'"):
        unidist.run(rank, engine="shmm")
    with pytest.raises(ConfigurationError, match="unknown strategy 'datta'"):
        unidist.run(rank, strategy="datta")
    with pytest.raises(ConfigurationError, match="num_proc=0"):
        unidist.run(rank, num_proc=0)
    with pytest.raises(ConfigurationError, match="UNIDIST_TIMEOUT_SEC='soon' is not a number"):
        unidist.run(rank, env={"UNIDIST_TIMEOUT_SEC": "soon"})
