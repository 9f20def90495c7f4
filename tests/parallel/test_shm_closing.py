"""Closing a communicator of the shm engine while other threads use it: its memory is unmapped right after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from unidist.testing.fixtures import RankPoolFactory

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("operation", ["barrier", "allreduce", "recv", "send"])
def test_a_wait_in_another_thread_ends_when_the_communicator_is_closed(
    rank_pool: RankPoolFactory, operation: str, tmp_path: Path
) -> None:
    def close(operation: str, mark: Path) -> list[str]:
        import threading
        import time

        from unidist.buffer import Buffer, DType
        from unidist.errors import PeerLostError, UsageError
        from unidist.runtime import context

        runtime = context.init()
        world, peer = runtime.world, 1 - runtime.topology.rank
        ends: list[str] = []

        def wait() -> None:
            large = world.allocate(1 << 20)
            issue = {
                "barrier": world.barrier,
                "allreduce": lambda: world.allreduce(large, large),
                "recv": lambda: world.recv(Buffer.allocate(8, DType.UINT8), source=peer),
                "send": lambda: world.send(large, to=peer),
            }
            try:
                issue[operation]().wait()
            except (PeerLostError, UsageError) as exc:
                ends.append(f"{type(exc).__name__}: {exc}")

        # Rank 0 waits for rank 1, which does not come; the other thread of rank 0 closes what it waits in.
        thread = threading.Thread(target=wait, daemon=True)
        if world.rank == 0:
            thread.start()
            time.sleep(0.3)  # let it get into the wait, which nothing outside can see
            world.close()
            thread.join(30)
            mark.touch()
            assert not thread.is_alive()
        deadline = time.monotonic() + 60
        while not mark.exists():  # a rank that left would end the wait, too
            assert time.monotonic() < deadline
            time.sleep(0.01)
        context.shutdown()
        return ends

    first, second = rank_pool(2, engine="shm", env={"UNIDIST_DEADLOCK_SEC": "0"}).run(
        close, (operation, tmp_path / "ended")
    )
    assert second == []
    assert len(first) == 1
    assert "closed" in first[0]
    assert first[0].startswith("UsageError")


def test_aborting_while_it_is_closed_touches_no_memory_that_is_gone(rank_pool: RankPoolFactory) -> None:
    def abort(cycles: int) -> int:
        import contextlib
        import sys
        import threading

        from unidist.errors import PeerLostError
        from unidist.runtime import context

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for _ in range(cycles):
                world = context.init().world
                with contextlib.suppress(PeerLostError):  # the other rank is through, and has aborted already
                    world.barrier().wait()
                ended = threading.Event()

                def hammer(world: object = world, ended: threading.Event = ended) -> None:
                    while not ended.is_set():
                        world.abort("a monitor gave up")  # type: ignore[attr-defined]
                        world.waiting_for()  # type: ignore[attr-defined]

                threads = [threading.Thread(target=hammer) for _ in range(3)]
                for thread in threads:
                    thread.start()
                context.shutdown()
                ended.set()
                for thread in threads:
                    thread.join()
        finally:
            sys.setswitchinterval(interval)
        return cycles

    assert rank_pool(2, engine="shm").run(abort, (60,)) == [60, 60]


def test_messages_while_it_is_closed_end_with_usage_errors(rank_pool: RankPoolFactory) -> None:
    def send(cycles: int) -> list[str]:
        import sys
        import threading

        from unidist.buffer import Buffer, DType
        from unidist.errors import PeerLostError, UsageError
        from unidist.runtime import context

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        found: list[str] = []
        try:
            for _ in range(cycles):
                world = context.init().world
                world.barrier().wait()

                def hammer(world: Any = world) -> None:
                    buffers = [Buffer.allocate(10, DType.UINT8), Buffer.allocate(5000, DType.UINT8)]
                    try:
                        while True:
                            for buffer in buffers:
                                work = world.recv(buffer, source=1 - world.rank)
                                world.send(buffer, to=1 - world.rank)
                                work.done()
                    except (PeerLostError, UsageError):
                        pass
                    except BaseException as exc:
                        found.append(repr(exc))

                threads = [threading.Thread(target=hammer) for _ in range(2)]
                for thread in threads:
                    thread.start()
                context.shutdown()
                for thread in threads:
                    thread.join()
        finally:
            sys.setswitchinterval(interval)
        return found

    assert rank_pool(2, engine="shm").run(send, (30,)) == [[], []]


def test_a_forked_child_does_not_close_what_its_parent_uses(rank_pool: RankPoolFactory) -> None:
    def fork() -> bool:
        import os

        from unidist.runtime import context

        world = context.init().world
        part = world.split(range(world.size))
        assert part is not None
        child = os.fork()
        if child == 0:
            part.close()  # as its collector does, if nothing refers to it
            os._exit(0)
        os.waitpid(child, 0)
        world.barrier().wait()
        looks_closed: bool = part.group.all_closed()  # type: ignore[attr-defined]
        world.barrier().wait()
        context.shutdown()
        return looks_closed

    assert rank_pool(2, engine="shm").run(fork) == [False, False]
