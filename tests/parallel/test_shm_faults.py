"""The shm engine when things go wrong: deaths, crowds, little memory. Nothing may stay, ever."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from unidist.errors import ConfigurationError, RemoteError
from unidist.jobs.pool.pool import RankPool
from unidist.testing.fixtures import RankPoolFactory

pytestmark = pytest.mark.parallel

_LIMIT_SEC = 40.0
# Ranks that are all in the middle of something, for ever: small, windowed and in-place all-reduces, and messages.
_BUSY_SCRIPT = """
    import os, sys
    from pathlib import Path
    from unidist.runtime import context
    from unidist.buffer import Buffer, DType

    runtime = context.init()
    world, rank, size = runtime.world, runtime.topology.rank, runtime.topology.world_size
    plain, engine = Buffer.allocate(1_000_000, DType.FLOAT32), world.allocate(4_000_000).cast(DType.FLOAT32)
    small = Buffer.allocate(10, DType.FLOAT32)
    rounds = 0
    while True:
        for buffer in (small, plain, engine):
            world.allreduce(buffer, buffer, scale=0.5).wait()
        sending = world.send(engine, to=(rank + 1) % size)
        world.recv(plain, source=(rank - 1) % size).wait()
        sending.wait()
        world.split(range(size)).close()
        rounds += 1
        if rounds == 3:
            Path(sys.argv[1], f"{rank}.pid").write_text(str(os.getpid()))
"""


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _LIMIT_SEC
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {_LIMIT_SEC:g} s"
        time.sleep(0.01)


class Job:
    """`unidist launch` of the busy script, in a process of its own."""

    def __init__(self, folder: Path, num_proc: int, name: str = "job") -> None:
        self.marks = folder / name
        self.marks.mkdir()
        self.temporary = folder / f"{name}-tmp"
        self.temporary.mkdir()
        script = folder / f"{name}.py"
        script.write_text(textwrap.dedent(_BUSY_SCRIPT))
        self.env = {**os.environ, "UNIDIST_ENGINE": "shm", "UNIDIST_TEST_MARK": f"{folder}/{name}"}
        self.env["TMPDIR"] = str(self.temporary)
        command = [sys.executable, "-m", "unidist_launch", "launch", "-np", str(num_proc), str(script), str(self.marks)]
        self.launcher = subprocess.Popen(command, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(lambda: len(list(self.marks.glob("*.pid"))) == num_proc, "that all ranks are at work")
        self.pids = [int((self.marks / f"{rank}.pid").read_text() or 0) for rank in range(num_proc)]

    def left(self) -> list[int]:
        """Processes of the job: those with its mark in their environment."""
        found = []
        marker = f"UNIDIST_TEST_MARK={self.env['UNIDIST_TEST_MARK']}".encode()
        for process in psutil.process_iter():
            try:
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and marker in Path(f"/proc/{process.pid}/environ").read_bytes():
                    found.append(process.pid)
            except (OSError, psutil.Error):
                continue
        return found

    def check_gone(self) -> None:
        """The launcher has ended, and no process, memory or socket of the job is left."""
        self.launcher.wait(_LIMIT_SEC)
        wait_for(lambda: not self.left(), "that every process of the job is gone")

    def end(self) -> None:
        """Clean up after a failed test."""
        for pid in self.left():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.launcher.wait()


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Job]:
    jobs: list[Job] = []
    before = set(os.listdir("/dev/shm"))

    def start_job(num_proc: int, name: str = "job") -> Job:
        jobs.append(Job(tmp_path, num_proc, name))
        return jobs[-1]

    yield start_job  # type: ignore[misc]  # a fixture
    for job in jobs:
        job.end()
        assert os.listdir(job.temporary) == []
    # Other processes of this machine may have files there for a while.
    wait_for(lambda: set(os.listdir("/dev/shm")) <= before, "that no file is left in shared memory")


@pytest.mark.parametrize("victims", [[0], [2], [0, 1, 2]])
def test_kill_9_of_ranks_ends_the_job_and_leaves_nothing(start: Callable[..., Job], victims: list[int]) -> None:
    job = start(3)
    for rank in victims:
        os.kill(job.pids[rank], signal.SIGKILL)
    job.check_gone()
    assert job.launcher.returncode == 137


def test_kill_9_of_the_launcher_ends_the_ranks_and_leaves_nothing(start: Callable[..., Job]) -> None:
    job = start(3)
    job.launcher.kill()
    job.check_gone()


def test_two_jobs_at_once_do_not_meet(start: Callable[..., Job]) -> None:
    first, second = start(2, "first"), start(2, "second")
    os.kill(first.pids[1], signal.SIGKILL)
    first.check_gone()
    done = len(second.left())
    assert done >= 3, "the other job ended too"
    assert all(psutil.pid_exists(pid) for pid in second.pids)
    second.launcher.terminate()
    second.check_gone()


def test_eight_ranks_share_the_cores_there_are(rank_pool: RankPoolFactory) -> None:
    def work() -> float:
        from unidist.buffer import Buffer, DType
        from unidist.runtime import context

        world = context.init().world
        buffer = Buffer.allocate(1000, DType.FLOAT32)
        begin = time.monotonic()
        for _ in range(200):
            world.allreduce(buffer, buffer).wait()
        seconds = time.monotonic() - begin
        context.shutdown()
        return seconds

    # A rank that spins through its time slice while others have to come costs minutes; sharing, a second.
    assert max(rank_pool(8, engine="shm").run(work)) < 60


def test_a_forked_child_that_outlives_its_rank_does_not_hide_its_death(rank_pool: RankPoolFactory) -> None:
    def survive(rank_of_victim: int) -> str:
        from unidist.buffer import Buffer
        from unidist.errors import PeerLostError
        from unidist.runtime import context

        rank = int(os.environ["UNIDIST_RANK"])
        if rank == rank_of_victim:
            victim = os.fork()
            if victim == 0:
                context.init()
                if os.fork() == 0:  # like a DataLoader's worker: idle, and still there when its parent is gone
                    time.sleep(60)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
            os.waitpid(victim, 0)
            return "died"
        world = context.init().world
        try:
            world.recv(Buffer.of(bytearray(1)), source=rank_of_victim).wait(timedelta(seconds=30))
        except PeerLostError as exc:
            return type(exc).__name__  # a StalledError, if the child hid it
        finally:
            context.shutdown()
        return "nothing"

    with RankPool(2, engine="shm", timeout=timedelta(seconds=90)) as pool:
        assert pool.run(survive, (1,)) == ["PeerLostError", "died"]


def test_too_small_an_address_space_says_what_to_raise(rank_pool: RankPoolFactory) -> None:
    def allocate() -> str:
        from unidist.runtime import context

        world = context.init().world
        try:
            world.allocate(64 << 20)
        except ConfigurationError as exc:
            return str(exc)
        finally:
            context.shutdown()
        return "no error"

    for text in rank_pool(2, engine="shm", env={"UNIDIST_SHM_CAPACITY_BYTES": str(32 << 20)}).run(allocate):
        assert str(64 << 20) in text
        assert str(32 << 20) in text
        assert "UNIDIST_SHM_CAPACITY_BYTES" in text


def test_too_little_memory_for_the_segments_is_told_at_init() -> None:
    def start_up() -> None:
        from unidist.runtime import context

        context.init()

    with RankPool(2, engine="shm", env={"UNIDIST_SHM_CAPACITY_BYTES": str(64 << 10)}) as pool:
        with pytest.raises(RemoteError, match="UNIDIST_SHM_CAPACITY_BYTES") as caught:
            pool.run(start_up)
        assert isinstance(caught.value.__cause__, ConfigurationError)


def test_a_limited_address_space_is_lived_with_or_told() -> None:
    def limited(nbytes: int) -> str:
        import resource

        import unidist.builtin.data  # noqa: F401 - importing needs memory too
        from unidist.buffer import Buffer
        from unidist.runtime import context

        used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, resource.RLIM_INFINITY))
        try:
            world = context.init().world
            data = Buffer.of(bytearray([1]))
            world.allreduce(data, data).wait()
            return str(data.bytes()[0])
        except ConfigurationError as exc:
            return str(exc)
        finally:
            context.shutdown()

    with RankPool(2, engine="shm", timeout=timedelta(seconds=30)) as pool:
        assert pool.run(limited, (4 << 30,)) == ["2", "2"]
    with RankPool(2, engine="shm", timeout=timedelta(seconds=30)) as pool:
        for text in pool.run(limited, (8 << 20,)):
            assert "UNIDIST_SHM_CAPACITY_BYTES" in text


def test_more_memory_than_the_machine_has_is_refused_with_figures(rank_pool: RankPoolFactory) -> None:
    def allocate() -> str:
        from unidist.runtime import context

        world = context.init().world
        try:
            world.allocate(1 << 44)
        except ConfigurationError as exc:
            return str(exc)
        finally:
            context.shutdown()
        return "no error"

    for text in rank_pool(2, engine="shm").run(allocate):
        assert str(1 << 44) in text
        assert "available" in text


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("unshare") is None, reason="mounting needs root and unshare")
def test_a_small_dev_shm_is_no_limit(tmp_path: Path) -> None:
    script = tmp_path / "large.py"
    script.write_text(
        textwrap.dedent(
            """
            import os
            from unidist.runtime import context
            from unidist.buffer import DType

            info = os.statvfs("/dev/shm")
            assert info.f_blocks * info.f_frsize == 64 << 20, info
            world = context.init().world
            count = 50_000_000
            buffer = world.allocate(4 * count).cast(DType.FLOAT32)
            world.allreduce(buffer, buffer).wait()
            sending = world.send(buffer.slice(0, 30_000_000), to=(world.rank + 1) % world.size)
            target = world.allocate(120_000_000).cast(DType.FLOAT32)
            world.recv(target, source=(world.rank - 1) % world.size).wait()
            sending.wait()
            print(f"rank {world.rank} moved {4 * count}")
            context.shutdown()
            """
        )
    )
    launch = f"{sys.executable} -m unidist_launch launch -np 2 --engine shm {script}"
    inside = f"mount -t tmpfs -o size=64m tmpfs /dev/shm && exec {launch}"
    outcome = subprocess.run(
        ["unshare", "-m", "sh", "-c", inside], capture_output=True, text=True, timeout=180, check=False
    )
    if "unshare" in outcome.stderr or "mount:" in outcome.stderr:
        pytest.skip(f"no mount namespace here: {outcome.stderr.strip()}")
    assert outcome.returncode == 0, outcome.stderr
    for rank in range(2):
        assert f"rank {rank} moved 200000000" in outcome.stdout
